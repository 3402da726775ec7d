"""These tokens end a response, and the response's text leaves out the one that ended it."""

import json
from pathlib import Path

import pytest

from broker.errors import ConfigError
from rollout_workers.decoding import Decoding, response_text, stop_token_ids
from rollout_workers.samples.throughput import Throughput


def model_dir(directory: Path, **configs: object) -> Path:
    for name, eos in configs.items():
        (directory / f"{name}.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory


def test_a_chat_models_turn_end_and_its_document_end_both_stop(tmp_path: Path) -> None:
    assert stop_token_ids(model_dir(tmp_path, generation_config=[7, 3]), 5) == (3, 5, 7)


def test_the_generation_config_comes_before_the_models(tmp_path: Path) -> None:
    assert stop_token_ids(model_dir(tmp_path, generation_config=0, config=9), None) == (0,)
    assert stop_token_ids(model_dir(tmp_path, generation_config=None, config=9), None) == (9,)


def test_a_model_without_any_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no response could ever end"):
        stop_token_ids(model_dir(tmp_path, config=None), None)


def test_the_token_that_ended_a_response_is_not_in_its_text() -> None:
    decoding = Decoding(lambda tokens: "".join(map(str, tokens)), (9,))
    assert [response_text(decoding, tokens) for tokens in ([1, 2, 9], [1, 9, 2], [9], [])] == [
        "12",
        "192",
        "",
        "",
    ]


def test_throughput_forgets_what_is_older_than_its_window() -> None:
    now = 0.0
    throughput = Throughput(window_s=10, clock=lambda: now)
    now = 5.0
    throughput.add(100)
    assert throughput.per_second() == 20
    now = 15.0
    assert throughput.per_second() == 10
    now = 15.1
    assert (throughput.per_second(), throughput.total) == (0, 100)


def test_an_engine_is_silent_since_its_last_token_or_its_first_request() -> None:
    now = 0.0
    throughput = Throughput(window_s=10, clock=lambda: now)
    throughput.add(1)
    now = 30.0
    throughput.expect()
    assert throughput.silent_s() == 0
    now = 42.0
    assert throughput.silent_s() == 12
    throughput.add(1)
    assert throughput.silent_s() == 0

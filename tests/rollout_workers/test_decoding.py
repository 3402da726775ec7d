"""These tokens end a response, and the response's text leaves out the one that ended it."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headway.broker.errors import ConfigError, HeadwayError
from headway.learner.models.pretrained import load_tokenizer
from headway.rollout_workers.decoding import Decoding, load_decoding, response_text
from headway.rollout_workers.samples.generation import Throughput
from tests.learner.tiny import model_config

END = 257
"""The end token of `thinker`."""


def test_a_worker_that_is_told_no_end_token_refuses_to_work(tmp_path: Path) -> None:
    load_tokenizer(model_config("qwen3")).save_pretrained(tmp_path)
    assert load_decoding(tmp_path, (3, 5)).stop_token_ids == (3, 5)
    with pytest.raises(HeadwayError):
        load_decoding(tmp_path, ())


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


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with a tokenizer of bytes and special tokens, one of which ends a response."""
    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True) for one in ("<pad>", "<end>", "<think>", "</think>", "<x>")])
    made.add_tokens([AddedToken("<plain>", special=False)])
    directory = tmp_path_factory.mktemp("thinker")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
    wrapped.save_pretrained(directory)
    assert wrapped.eos_token_id == END
    return directory


@pytest.mark.parametrize(
    ("keeps", "text"),
    [
        (None, "<think>5</think> a<plain><x>"),
        ((), "5 a<plain>"),
        (("<x>",), "5 a<plain><x>"),
        (("<think>", "</think>", "<end>"), "<end><think>5</think> a<plain>"),
    ],
)
def test_special_tokens_that_stay_in_a_responses_text(thinker: Path, keeps: tuple[str, ...] | None, text: str) -> None:
    tokens = AutoTokenizer.from_pretrained(thinker)("<end><pad><think>5</think> a<plain><x><end>").input_ids
    assert response_text(load_decoding(thinker, (END,), keeps), tokens) == text


@pytest.mark.parametrize("keeps", [("<thikn>",), ("<plain>",), ("<x>", "a")])
def test_a_token_to_keep_that_is_no_special_one_is_refused(thinker: Path, keeps: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.keep_special_tokens"):
        load_decoding(thinker, (END,), keeps)

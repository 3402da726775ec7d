"""The samples that a page shows: the choice of them, their pieces, and their text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headway.broker.schema import AgentCall, Group, Turn, VersionSpan, WeightVersion
from headway.deploy.run.run_directory import CHECKPOINTS, EXPERIENCE
from headway.deploy.run.samples import GROUPS, Piece, SampleReader, samples_of
from headway.learner.experience import log_files
from headway.learner.experience.log import ExperienceLog
from headway.learner.experience.log_files import HEADER_BYTES, GroupFrames
from tests.learner.batches import change, group, place_of

PLENTY = 1 << 20

WORDS = {f"w{number}": number for number in range(100)}


def logged(directory: Path, step: int, *groups: Group) -> Path:
    """Write a batch into the run's experience log."""
    (directory / EXPERIENCE).mkdir(parents=True, exist_ok=True)
    ExperienceLog(directory / EXPERIENCE, PLENTY).record(step, groups)
    return place_of(directory / EXPERIENCE, step).path


def two_turns(step: int) -> Group:
    """Return a group whose first sample is of two versions, with an environment's answer in between."""
    made = group(1, (0, 1, 2), step=step)
    first, *others = made.trajectories
    first = replace(
        first,
        response_tokens=np.array([5, 6, 7, 8], np.int32),
        behavior_logprobs=np.array([-1, -1, 0, -1], np.float32),
        loss_mask=np.array([1, 1, 0, 1], np.uint8),
        spans=(VersionSpan(0, 1, WeightVersion(1, step - 2)), VersionSpan(1, 4, WeightVersion(1, step))),
        reward=9.0,
    )
    return replace(made, trajectories=(first, *others))


def test_an_agents_turns_are_shown_with_what_they_go_on_after(tmp_path: Path) -> None:
    made = group(1, (0,), step=4)
    calls = [
        (0, 2, AgentCall(-1, len(made.prompt.token_ids))),
        (3, 4, AgentCall(0, len(made.prompt.token_ids) + 2)),
        (4, 5, AgentCall(0, len(made.prompt.token_ids) + 1)),
        (6, 7, AgentCall(-1, 0, role="auxiliary")),
    ]
    mask = np.array([1, 1, 0, 1, 1, 0, 0], np.uint8)
    sample = replace(
        made.trajectories[0],
        response_tokens=np.arange(5, 12, dtype=np.int32),
        behavior_logprobs=-mask.astype(np.float32),
        loss_mask=mask,
        spans=(VersionSpan(0, 1, WeightVersion(1, 2)), VersionSpan(1, 7, WeightVersion(1, 4))),
        turns=tuple(Turn(start, end, 0.0, call) for start, end, call in calls),
    )
    logged(tmp_path, 4, replace(made, trajectories=(sample,)))
    length = len(made.prompt.token_ids)
    shown = [(piece.text, piece.is_sampled, piece.note) for piece in samples_of(tmp_path)[0].pieces]
    assert shown == [
        ("5 ", True, "turn 1, after the prompt"),
        ("6 ", True, ""),
        ("7 ", False, "turn 2, after turn 1"),
        ("8 ", True, ""),
        ("9 ", True, f"turn 3, after {length + 1} of {length + 2} tokens up to turn 1"),
        ("10 ", False, "turn 4, a new conversation, not trained"),
        ("11 ", True, ""),
    ]


def test_a_response_is_shown_by_version_lag_and_turn(tmp_path: Path) -> None:
    logged(tmp_path, 4, two_turns(4))
    checkpoint = tmp_path / CHECKPOINTS / "1" / "step_2"
    checkpoint.mkdir(parents=True)
    Tokenizer(WordLevel(WORDS, unk_token="w0")).save(str(checkpoint / "tokenizer.json"))
    best, worst = samples_of(tmp_path)
    assert best.pieces == [
        Piece(text="w5", version="1.2", lag=2, is_sampled=True),
        Piece(text="w6", version="1.4", lag=0, is_sampled=True),
        Piece(text="w7", version="1.4", lag=0, is_sampled=False),
        Piece(text="w8", version="1.4", lag=0, is_sampled=True),
    ]
    assert (best.step, best.reward, best.tokens, best.prompt) == (4, 9.0, 4, two_turns(4).prompt.text)
    assert worst.reward < best.reward


def test_the_newest_and_the_oldest_step_are_shown_and_damaged_ones_are_not(tmp_path: Path) -> None:
    assert samples_of(tmp_path) == []
    for step in (3, 20, 100):
        logged(tmp_path, step, group(step, step=step))
    assert [sample.step for sample in samples_of(tmp_path)] == [100, 100, 3, 3]
    change(tmp_path / EXPERIENCE, 100, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    assert [sample.step for sample in samples_of(tmp_path)] == [3, 3]
    change(tmp_path / EXPERIENCE, 100, lambda content: content[:-9])  # torn
    assert [sample.step for sample in samples_of(tmp_path)] == [20, 20, 3, 3]


def test_without_a_tokenizer_responses_are_token_ids(tmp_path: Path) -> None:
    logged(tmp_path, 4, two_turns(4))
    checkpoint = tmp_path / CHECKPOINTS / "1" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "tokenizer.json").write_text("{")
    assert [piece.text for piece in samples_of(tmp_path)[0].pieces] == ["5 ", "6 ", "7 ", "8 "]


def test_a_batch_is_read_once_and_only_its_first_groups_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []
    opened: list[Any] = []
    monkeypatch.setattr(GroupFrames, "group", noted(decoded, GroupFrames.group))
    monkeypatch.setattr(log_files, "read_first_groups", noted(opened, log_files.read_first_groups))
    numbers = range(3 * GROUPS)
    for step in (3, 4):
        logged(tmp_path, step, *(group(number, step=step) for number in numbers))
    reader = SampleReader()
    shown = reader.read(tmp_path)
    assert (len(shown), len(decoded), len(opened)) == (4 * GROUPS, 2 * GROUPS, 2)
    assert reader.read(tmp_path) == shown
    assert len(opened) == 2
    logged(tmp_path, 5, two_turns(5))
    assert [sample.step for sample in reader.read(tmp_path)] == [5, 5] + 2 * GROUPS * [3]
    assert len(opened) == 3


def test_a_batch_that_is_damaged_behind_the_groups_shown_is_not_shown(tmp_path: Path) -> None:
    path = logged(tmp_path, 3, *(group(number, step=3) for number in range(3 * GROUPS)))
    whole = path.read_bytes()
    reader = SampleReader()
    for damaged in (whole[:-9], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:4] + b"x" + whole[5:]):
        path.write_bytes(damaged)
        assert reader.read(tmp_path) == []
    path.write_bytes(whole)
    assert len(reader.read(tmp_path)) == 2 * GROUPS


def test_a_step_of_an_older_version_is_shown(tmp_path: Path) -> None:
    path = logged(tmp_path, 3, two_turns(3))
    expected = samples_of(tmp_path)
    path.with_name("step_3.zst").write_bytes(path.read_bytes()[HEADER_BYTES:])
    path.unlink()
    assert samples_of(tmp_path) == expected != []


def test_samples_are_decoded_anew_once_there_is_a_tokenizer(tmp_path: Path) -> None:
    logged(tmp_path, 4, two_turns(4))
    reader = SampleReader()
    assert reader.read(tmp_path)[0].pieces[0].text == "5 "
    checkpoint = tmp_path / CHECKPOINTS / "1" / "step_2"
    checkpoint.mkdir(parents=True)
    Tokenizer(WordLevel(WORDS, unk_token="w0")).save(str(checkpoint / "tokenizer.json"))
    assert reader.read(tmp_path)[0].pieces[0].text == "w5"


def noted(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that it adds each call of it to `calls`."""

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call

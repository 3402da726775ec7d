"""Trained samples to read: prompt, response in the pieces that each weight version sampled, and reward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import AgentCall, Group, Trajectory
from headway.broker.wire.rows import TurnRows, is_of_agent

from .run_directory import CHECKPOINTS, EXPERIENCE

if TYPE_CHECKING:
    from headway.learner.experience.log_files import BatchPlace

GROUPS = 4
"""Groups that are shown of a step; of each the best and the worst sample."""
MOST_TOKENS = 4000
"""Response tokens that are shown of a sample."""

Decode = Callable[[Sequence[int]], str]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Response tokens that follow each other and that one weight version sampled."""

    text: str
    version: str
    lag: int
    """The steps between that version and the step that trained the piece."""
    is_sampled: bool
    """False: it is what an environment or an agent says, which is not trained."""
    note: str = ""
    """Where the first piece of an agent's turn goes on from; "": the piece goes on after the one before."""


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """One trained trajectory."""

    step: int
    tid: str
    worker: str
    prompt: str
    truth: str
    pieces: list[Piece]
    tokens: int
    """Response tokens, those beyond MOST_TOKENS among them."""
    reward: float
    finish_reason: str


Stamp = tuple[Path, int, int]
"""A file, its size and the time of its last change in ns: what changes whenever its content does."""
Logged = tuple[int, "BatchPlace", bytes]
"""A step, where its batch lies, and the last bytes there: the checksum of its content."""
CHECKSUM_BYTES = 4


class SampleReader:
    """Reads the samples of a run again and again, and each batch only once as long as it stays as it was."""

    def __init__(self) -> None:
        self._tokenizer: Stamp | None = None
        self._decode: Decode = _as_numbers
        self._read: dict[Logged, list[ShownSample]] = {}

    def read(self, directory: Path) -> list[ShownSample]:
        """Return samples of the newest and the oldest step in the run's experience log, the newest first.

        Empty where the run keeps no log (`checkpoint.log_bytes: 0`), or its batches are damaged.
        Responses are token ids until a checkpoint holds the tokenizer.
        """
        self._find_tokenizer(directory / CHECKPOINTS)
        batches = list(dict.fromkeys(_newest_and_oldest(directory / EXPERIENCE)))
        self._read = {logged: self._samples(logged) for logged in batches}
        return [sample for logged in batches for sample in self._read[logged]]

    def _find_tokenizer(self, checkpoints: Path) -> None:
        stamps = filter(None, map(_stamp, checkpoints.glob("*/step_*/tokenizer*")))
        newest = max(stamps, key=lambda stamp: stamp[2], default=None)
        if newest != self._tokenizer:
            self._tokenizer, self._decode, self._read = newest, _decoder(newest), {}

    def _samples(self, logged: Logged) -> list[ShownSample]:
        step, place, _ = logged
        return self._read[logged] if logged in self._read else list(_of_step(place, step, self._decode))


def samples_of(directory: Path) -> list[ShownSample]:
    """Return what a SampleReader reads there."""
    return SampleReader().read(directory)


def _stamp(path: Path) -> Stamp | None:
    """Return None where the file is gone: retention may remove it at any time."""
    try:
        found = path.stat()
    except OSError:
        return None
    return path, found.st_size, found.st_mtime_ns


def _newest_and_oldest(log: Path) -> Iterator[Logged]:
    from headway.learner.experience.log_files import files_in, read_segment

    paths = files_in(log)
    for ordered, choose in ((reversed(paths), max), (iter(paths), min)):
        held = next((places for path in ordered if (places := read_segment(path).places)), None)
        if held:
            step = choose(held)
            place = held[step]
            yield step, place, _last_bytes(place)


def _last_bytes(place: "BatchPlace") -> bytes:
    """Return none where the file is gone: retention may remove it at any time."""
    with suppress(OSError), place.path.open("rb") as file:
        file.seek(place.start + max(place.length - CHECKSUM_BYTES, 0))
        return file.read(CHECKSUM_BYTES)
    return b""


def _of_step(place: "BatchPlace", step: int, decode: Decode) -> Iterator[ShownSample]:
    from headway.learner.experience.log_files import read_first_groups

    try:
        groups = read_first_groups(place, "", step, GROUPS)
    except HeadwayError:
        return
    for group in groups:
        ranked = sorted(group.trajectories, key=lambda one: one.reward)
        for trajectory in (ranked[-1], ranked[0])[: len(ranked)]:
            yield _sample(group, trajectory, step, decode)


def _sample(group: Group, trajectory: Trajectory, step: int, decode: Decode) -> ShownSample:
    return ShownSample(
        step=step,
        tid=str(trajectory.tid),
        worker=trajectory.worker,
        prompt=group.prompt.text,
        truth=str(group.prompt.ground_truth),
        pieces=list(_pieces(trajectory, step, decode)),
        tokens=len(trajectory.response_tokens),
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
    )


def _pieces(trajectory: Trajectory, step: int, decode: Decode) -> Iterator[Piece]:
    tokens = trajectory.response_tokens[:MOST_TOKENS]
    for first, last, is_sampled, note in _stretches(trajectory):
        for span in trajectory.spans:
            start, end = max(first, span.start), min(last, span.end, len(tokens))
            if start < end:
                yield Piece(
                    text=decode(tokens[start:end].tolist()),
                    version=str(span.version),
                    lag=step - span.version.step,
                    is_sampled=is_sampled,
                    note=note if start == first else "",
                )


def _stretches(trajectory: Trajectory) -> Iterator[tuple[int, int, bool, str]]:
    """Yield the response positions [start, end) of what was sampled and of what was read, with a note of an agent's
    turn."""
    if not is_of_agent(trajectory.turns):
        mask = trajectory.loss_mask
        bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        yield from ((start, end, bool(mask[start]), "") for start, end in pairwise(bounds))
        return
    tree, end = TurnRows(trajectory.prompt_tokens, trajectory.response_tokens), 0
    for number, turn in enumerate(trajectory.turns):
        assert turn.call is not None
        note = _note(number, turn.call, len(tree.tokens(turn.call.after)))
        if end < turn.start:
            yield end, turn.start, False, note
        yield turn.start, turn.end, True, note if end == turn.start else ""
        tree.add(turn.start, end := turn.end, turn.call)


def _note(number: int, call: AgentCall, length: int) -> str:
    """Return where a turn goes on from; `length`: tokens of the row that it goes on after."""
    whose = "the prompt" if call.after < 0 else f"turn {call.after + 1}"
    if call.keeps == length:
        after = f"after {whose}"
    else:
        after = f"after {call.keeps} of {length} tokens up to {whose}" if call.keeps else "a new conversation"
    return f"turn {number + 1}, {after}{', not trained' if call.role == 'auxiliary' else ''}"


def _decoder(stamp: Stamp | None) -> Decode:
    """Return the decoder of the tokenizer of this file; where none can be read, one that writes token ids."""
    from tokenizers import Tokenizer

    if stamp is None:
        return _as_numbers
    directory = stamp[0].parent
    tokenizer: Any
    try:
        if (directory / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        else:
            from transformers import AutoTokenizer  # makes one of other files, more slowly

            tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception:  # noqa: BLE001 - the library raises nothing narrower; retention may remove the checkpoint
        return _as_numbers
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))


def _as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) + " "

"""Trained samples to read: prompt, response in the pieces that each weight version sampled, and reward."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from broker.errors import HeadwayError
from broker.schema import Group, Trajectory

from .directory import CHECKPOINTS, EXPERIENCE

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
    """False: it is an environment's answer, which is not trained."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
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


def samples_of(directory: Path) -> list[Sample]:
    """Return samples of the newest and the oldest step in the run's experience log, the newest first.

    Empty where the run keeps no log (`checkpoint.log_bytes: 0`), or its files are damaged or being written. Responses
    are token ids until a checkpoint holds the tokenizer.
    """
    steps = sorted(_steps(directory / EXPERIENCE))
    decode = _decoder(directory / CHECKPOINTS)
    chosen = dict.fromkeys([steps[-1], steps[0]]) if steps else ()
    return [sample for step in chosen for sample in _of_step(directory / EXPERIENCE, step, decode)]


def _steps(log: Path) -> Iterator[int]:
    for path in log.glob("step_*.zst"):
        if (number := path.stem.removeprefix("step_")).isdecimal():
            yield int(number)


def _of_step(log: Path, step: int, decode: Decode) -> Iterator[Sample]:
    from learner.experience.logged_batch import read_batch

    try:
        groups = read_batch(log / f"step_{step}.zst", "", step)
    except HeadwayError:
        return
    for group in groups[:GROUPS]:
        ranked = sorted(group.trajectories, key=lambda one: one.reward)
        for trajectory in (ranked[-1], ranked[0])[: len(ranked)]:
            yield _sample(group, trajectory, step, decode)


def _sample(group: Group, trajectory: Trajectory, step: int, decode: Decode) -> Sample:
    return Sample(
        step=step,
        tid=str(trajectory.tid),
        worker=trajectory.worker,
        prompt=group.prompt.text,
        truth=group.prompt.ground_truth,
        pieces=list(_pieces(trajectory, step, decode)),
        tokens=len(trajectory.response_tokens),
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
    )


def _pieces(trajectory: Trajectory, step: int, decode: Decode) -> Iterator[Piece]:
    tokens, mask = trajectory.response_tokens[:MOST_TOKENS], trajectory.loss_mask[:MOST_TOKENS]
    turns = (np.flatnonzero(np.diff(mask)) + 1).tolist()
    for span in trajectory.spans:
        bounds = [span.start, *(turn for turn in turns if span.start < turn < span.end), min(span.end, len(tokens))]
        for start, end in pairwise(bounds):
            if start < end:
                yield Piece(
                    text=decode(tokens[start:end].tolist()),
                    version=str(span.version),
                    lag=step - span.version.step,
                    is_sampled=bool(mask[start]),
                )


def _decoder(checkpoints: Path) -> Decode:
    """Return the decoder of the newest checkpoint's tokenizer; without one, it writes token ids."""
    from tokenizers import Tokenizer

    found = max(checkpoints.glob("*/step_*/tokenizer.json"), key=lambda path: path.stat().st_mtime, default=None)
    try:
        tokenizer = None if found is None else Tokenizer.from_file(str(found))
    except Exception:  # noqa: BLE001 - the library raises nothing narrower; retention may remove the checkpoint
        tokenizer = None
    if tokenizer is None:
        return lambda tokens: " ".join(map(str, tokens)) + " "
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))

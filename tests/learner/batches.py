"""Batches as the broker returns them, without a broker."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.broker.schema import Group, Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.learner.experience.log_files import BatchPlace, segments_in
from tests.learner.tiny import VOCABULARY


def group(number: int, samples: tuple[int, ...] = (0, 1, 2), *, round_: int = 0, step: int = 0) -> Group:
    """Return a group that is random, from its number alone. It has these `samples`; a trimmed group lacks some."""
    name = f"0000-{number:08d}"
    prompt = Prompt(
        group=name,
        token_ids=[1, 2, 3 + number % 7],
        text="1+2",
        ground_truth="3",
        data_source="tests",
        extra_info={"parts": [1, 2.5, None]},
        num_samples=3,
    )
    sampled = tuple(_trajectory(prompt, TrajectoryId(name, round_, sample), step) for sample in samples)
    return Group(prompt=prompt, round=round_, trajectories=sampled)


def _trajectory(prompt: Prompt, tid: TrajectoryId, step: int) -> Trajectory:
    rng = np.random.default_rng([*str(tid).encode()])
    length = int(rng.integers(4, 12))
    return Trajectory(
        tid=tid,
        prompt_tokens=np.array(prompt.token_ids, np.int32),
        response_tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        behavior_logprobs=-rng.uniform(2, 4, length).astype(np.float32),
        loss_mask=rng.integers(0, 2, length).astype(np.uint8),
        spans=(VersionSpan(0, length, WeightVersion(1, step)),),
        reward=float(rng.normal()),
        rewards={"right": 0.1},
        finish_reason="stop",
        worker="w",
    )


def batch(step: int) -> list[Group]:
    """Return two groups, the second trimmed."""
    return [group(2 * step), group(2 * step + 1, samples=(0, 2))]


def place_of(directory: Path, step: int) -> BatchPlace:
    """Return where a log keeps the batch of this step."""
    return next(one.places[step] for one in segments_in(directory) if step in one.places)


def change(directory: Path, step: int, how: Callable[[bytes], bytes]) -> Path:
    """Give the batch of this step other bytes in the log, and return its file."""
    place = place_of(directory, step)
    content = place.path.read_bytes()
    end = place.start + place.length
    place.path.write_bytes(content[: place.start] + how(content[place.start : end]) + content[end:])
    return place.path


def damage(directory: Path, step: int) -> Path:
    """Damage the batch of this step alone."""
    return change(directory, step, lambda content: b"damaged" + content[7:])

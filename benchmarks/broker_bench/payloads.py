"""Trajectories whose frame has a given size."""

from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.broker.schema import Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.wire.codec import encode_trajectory

GROUP_SIZE = 8
PROMPT_TOKENS, SHORT_PROMPT = 64, 4
VOCABULARY = 150_000
_VARIANTS = 16
"""The number of different responses that take turns."""


def tid_of(number: int) -> TrajectoryId:
    """Return the id of trajectory `number`: eight to a group."""
    return TrajectoryId(f"0000-{number // GROUP_SIZE:08d}", 0, number % GROUP_SIZE)


def number_of(tid: TrajectoryId) -> int:
    return int(tid.group.partition("-")[2]) * GROUP_SIZE + tid.sample


def prompt(position: int, num_samples: int = GROUP_SIZE, tokens: int = PROMPT_TOKENS) -> Prompt:
    return Prompt(
        group=f"0000-{position:08d}",
        token_ids=_prompt_tokens(tokens),
        text="How many are they?",
        ground_truth="42",
        data_source="benchmark",
        num_samples=num_samples,
    )


@cache
def _prompt_tokens(count: int) -> list[int]:
    tokens: list[int] = _tokens(np.random.default_rng(0), count).tolist()
    return tokens


@dataclass(frozen=True)
class Payloads:
    """Trajectories made of a few prepared responses, as `payloads[number]`."""

    variants: tuple[Trajectory, ...]

    def __getitem__(self, number: int) -> Trajectory:
        return self.named(tid_of(number))

    def named(self, tid: TrajectoryId) -> Trajectory:
        """Return the trajectory with this id."""
        return msgspec.structs.replace(self.variants[number_of(tid) % len(self.variants)], tid=tid)

    @property
    def frame_bytes(self) -> float:
        """Return the mean size of the frames."""
        return sum(len(encode_trajectory(variant)) for variant in self.variants) / len(self.variants)


@cache
def payloads_of(frame_bytes: int, prompt_tokens: int = PROMPT_TOKENS) -> Payloads:
    """Return trajectories with frames of so many bytes, to within two per cent or one token."""
    low, high = 1, frame_bytes
    while low < high:
        middle = (low + high) // 2
        if len(encode_trajectory(_trajectory(0, middle, prompt_tokens))) < frame_bytes:
            low = middle + 1
        else:
            high = middle
    return Payloads(tuple(_trajectory(seed, low, prompt_tokens) for seed in range(_VARIANTS)))


def _trajectory(seed: int, response_tokens: int, prompt_tokens: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        tid=tid_of(0),
        prompt_tokens=np.array(_prompt_tokens(prompt_tokens), np.int32),
        response_tokens=_tokens(rng, response_tokens),
        behavior_logprobs=-rng.exponential(0.5, response_tokens).astype(np.float32),
        loss_mask=np.ones(response_tokens, np.uint8),
        spans=(VersionSpan(0, response_tokens, WeightVersion(1, 0)),),
        reward=1.0,
        rewards={"exact": 1.0},
        finish_reason="stop",
        worker="benchmark",
    )


def _tokens(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Draw tokens log-uniformly over the vocabulary: common words are common, as in text."""
    return np.exp(rng.uniform(0.0, np.log(VOCABULARY), count)).astype(np.int32)

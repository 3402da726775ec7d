"""The figures of a step by lag: what its objective reports of tokens, and rewards of trajectories."""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from headway.algorithms.metrics import LAG_BUCKETS
from headway.broker.schema.step_metrics import LagFigures
from headway.learner.batching.packing import PackableSequence, rollouts_of


def lag_of_sequence(sequence: PackableSequence) -> int:
    """Returns the lag of the oldest trained token; 0 where none is trained."""
    return int((sequence.lags * sequence.loss_mask).max(initial=0))


def lags_of_rollouts(sequences: Sequence[PackableSequence]) -> list[int]:
    """Returns the lag of the oldest trained token of each rollout, in any of its rows."""
    return [max(map(lag_of_sequence, rows)) for rows in rollouts_of(sequences)]


def tokens_by_lag(sequences: Sequence[PackableSequence]) -> dict[int, int]:
    """Returns the number of trained tokens of each lag that occurs."""
    trained = [sequence.lags[sequence.loss_mask != 0] for sequence in sequences]
    counts = np.bincount(np.concatenate([*trained, np.zeros(0, np.int64)]))
    return {int(lag): int(counts[lag]) for lag in counts.nonzero()[0]}


def figures_by_lag(
    sequences: Sequence[PackableSequence], rewards: Sequence[float], of_tokens: Mapping[int, Mapping[str, float]]
) -> dict[int, LagFigures]:
    """Returns the figures of every bucket of LAG_BUCKETS that occurs, by its largest lag.

    `rewards` are those of the rollouts' trajectories, in their order; `of_tokens` is `Update.by_lag`.
    """
    rewards_by_lag: dict[int, list[float]] = {}
    for lag, reward in zip(lags_of_rollouts(sequences), rewards, strict=True):
        rewards_by_lag.setdefault(bucket_of(lag), []).append(reward)
    tokens: Counter[int] = Counter()
    for lag, count in tokens_by_lag(sequences).items():
        tokens[bucket_of(lag)] += count
    return {
        lag: _figures(rewards_by_lag.get(lag, ()), tokens[lag], of_tokens.get(lag, {}))
        for lag in sorted(rewards_by_lag.keys() | tokens.keys())
    }


def bucket_of(lag: int) -> int:
    """Returns the largest lag of the bucket to which `lag` belongs."""
    return LAG_BUCKETS[min(bisect.bisect_left(LAG_BUCKETS, lag), len(LAG_BUCKETS) - 1)]


def _figures(rewards: Sequence[float], tokens: int, of_tokens: Mapping[str, float]) -> LagFigures:
    """Returns one bucket's figures, without those that JSON cannot express."""
    known = {name: value for name, value in of_tokens.items() if math.isfinite(value)}
    return LagFigures(
        trajectories=len(rewards),
        tokens=tokens,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        ratio_mean=known.get("ratio_mean"),
        ess=known.get("ess"),
        clip_fraction=known.get("clip_fraction"),
        mask_fraction=known.get("mask_fraction"),
        reverse_kl=known.get("reverse_kl"),
    )

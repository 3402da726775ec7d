"""The quality and the speed of packing, against bounds that no plan can beat and against padded mini-batches.

    python -m benchmarks.packing [--sequences 1000 10000 100000] [--replicas 1 8 64] [--budgets 16384 32768]

Costs are FLOPs of Qwen3-8B's shape (`learner/batching/cost.py`). Progress goes to stderr;
the last line is one JSON object.

    micro_batches     of a replica; `fewest`: ceil(ceil(tokens / budget) / replicas), which no plan can beat
    unused            share of the token budgets that stays empty
    imbalance         max / mean over replicas of their cost
    waiting           sum over k of the costliest k-th micro-batch (replicas wait for each other at each), over a bound
                      that no plan can beat: the mean of the replicas, or the costliest sequence
    padded, sorted    the same sum for mini-batches padded to their longest sequence, over ours: in order of arrival,
                      and sorted by length first; both as large as the token budget allows
    plan_s            processor seconds of one plan, the median of three
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from headway.learner.batching.cost import CostModel
from headway.learner.batching.packing import Plan, plan
from headway.learner.models.shape import shape_of

from . import command

SHORTEST, LONGEST = 32, 16384
ROUNDS = 3


def lognormal(count: int) -> NDArray[np.int64]:
    """Draw lengths with a median of 1,500 tokens; a twentieth is longer than 7,800."""
    return _clipped(np.random.default_rng(0).lognormal(math.log(1500), 1.0, count))


def mixture(count: int) -> NDArray[np.int64]:
    """Draw lengths of short answers and of answers that think; one in twenty reaches the limit or nearly."""
    rng = np.random.default_rng(1)
    kinds = rng.choice(3, count, p=(0.6, 0.35, 0.05))
    short, thinking = rng.lognormal(math.log(900), 0.6, count), rng.lognormal(math.log(4000), 0.7, count)
    return _clipped(np.choose(kinds, [short, thinking, rng.uniform(12000, LONGEST + 1, count)]))


def _clipped(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    return lengths.clip(SHORTEST, LONGEST).astype(np.int64)


DISTRIBUTIONS: dict[str, Callable[[int], NDArray[np.int64]]] = {"lognormal": lognormal, "mixture": mixture}


def qwen3_8b() -> CostModel:
    from transformers import Qwen3Config

    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    return CostModel.of_model(shape_of(Qwen3Config(num_key_value_heads=8, head_dim=128, **sizes)))


def measure(lengths: NDArray[np.int64], replicas: int, budget: int, cost: CostModel) -> dict[str, float]:
    """Return the figures of one case."""
    planned, seconds = _timed(lambda: plan(lengths.tolist(), replicas, budget, cost))
    tokens, count = int(lengths.sum()), len(planned[0])
    costs_RK = np.array([[cost.of_micro_batch(lengths[chosen]) for chosen in share] for share in planned])
    waited = float(costs_RK.max(axis=0).sum())
    least = _least(lengths, replicas, count, cost)
    return {
        "micro_batches": count,
        "fewest": math.ceil(math.ceil(tokens / budget) / replicas),
        "unused": 1 - tokens / (count * replicas * budget),
        "imbalance": float(costs_RK.sum(axis=1).max() / costs_RK.sum(axis=1).mean()),
        "waiting": waited / least,
        "padded": _padded(lengths, replicas, budget, cost) / waited,
        "sorted": _padded(np.sort(lengths)[::-1], replicas, budget, cost) / waited,
        "plan_s": seconds,
    }


def _timed(make: Callable[[], Plan]) -> tuple[Plan, float]:
    """Return the plan, and the median seconds of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        made = make()
        seconds.append(time.process_time() - start)
    return made, statistics.median(seconds)


def _least(lengths: NDArray[np.int64], replicas: int, count: int, cost: CostModel) -> float:
    """Return a lower bound: the cost of so many micro-batches with the costliest sequence, or with the mean."""
    alone = cost.of_sequences(lengths)
    return count * cost.per_micro_batch + max(float(alone.sum()) / replicas, float(alone.max()))


def _padded(lengths: NDArray[np.int64], replicas: int, budget: int, cost: CostModel) -> float:
    """Deal mini-batches in this order to replicas in turn; each computes rows as long as its longest sequence."""
    costs = [
        cost.per_micro_batch + rows * float(cost.of_sequences(longest)) for rows, longest in _rows(lengths, budget)
    ]
    return sum(max(costs[start : start + replicas]) for start in range(0, len(costs), replicas))


def _rows(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, longest of them) of consecutive mini-batches of at most `budget` places."""
    rows = longest = 0
    for length in map(int, lengths):
        if rows and (rows + 1) * max(longest, length) > budget:
            yield rows, longest
            rows = longest = 0
        rows, longest = rows + 1, max(longest, length)
    yield rows, longest


def main() -> int:
    """Measure all cases."""
    parser = command.parser(__doc__, "packing")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 32_768])
    options = parser.parse_args()
    cost, cases = qwen3_8b(), []
    for name, count, replicas, budget in product(DISTRIBUTIONS, options.sequences, options.replicas, options.budgets):
        case: dict[str, object] = {"lengths": name, "sequences": count, "replicas": replicas, "budget": budget}
        case |= measure(DISTRIBUTIONS[name](count), replicas, budget, cost)
        command.tell(
            " ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in case.items()
            )
        )
        cases.append(case)
    return command.finish({"cases": cases})


if __name__ == "__main__":
    sys.exit(main())

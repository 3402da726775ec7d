"""The learning rate of each step, from its number alone: a resumed run needs to know nothing else."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, steps: int, *, peak: float, warmup_steps: int, schedule: Schedule) -> float:
    """Returns the rate of a step, from 0: it rises linearly to `peak` over `warmup_steps`, since fresh Adam moments
    make the first steps too large, and then stays, or falls towards 0 behind the last of `steps`."""
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))  # a replay may be told of fewer steps
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2

"""The broker bounds lag here; `algorithms/corrections` corrects for the lag that remains.

The Lua scripts apply the same rules. These functions define them in integers, and the tests compare the two. Lag counts
steps, never incarnations: a resumed learner replays the same steps with the same batches. It counts from the weights
that sampled a token, even if older weights have cached the keys and values before it (`weights.kv_policy`).
"""

from collections.abc import Iterable

from .schema import VersionSpan, WeightVersion


def lag_of(version: WeightVersion, step: int) -> int:
    """Returns the lag of a token sampled by `version` and trained at `step`: an integer >= 0."""
    return step - version.step


def oldest_step(spans: Iterable[VersionSpan]) -> int:
    """Returns the step of the oldest weights in `spans` (at least one span)."""
    return min(span.version.step for span in spans)


def is_too_stale(version: WeightVersion, step: int, max_lag: int) -> bool:
    """Returns whether a token of `version` is too old to be trained at `step`."""
    return lag_of(version, step) > max_lag


def training_slot(index: int, groups_per_step: int) -> int:
    """Returns the step that trains the group admitted as number `index` (drops not counted), if all goes in order."""
    return index // groups_per_step


def may_admit(index: int, weight_step: int, max_lag: int, groups_per_step: int) -> bool:
    """Returns whether weights of `weight_step` may generate for the group admitted as number `index`.

    Admission asks this of the announced step and every lease asks it of the worker's own: a sample begun with
    weights s is then due by step s + max_lag at the latest, so groups trained in order never exceed the
    bound.
    """
    return training_slot(index, groups_per_step) <= weight_step + max_lag


def is_in_reach(index: int, announced_step: int, ahead: float, groups_per_step: int) -> bool:
    """Returns whether the group admitted as number `index` is among those of the next step, or of `ahead` steps more.

    Admission asks this, too. With `ahead` at most `max_lag` it admits no group that `may_admit` refuses to the
    announced weights; where it is less, a group that takes long has steps left until it would be over the bound.
    """
    return index < (announced_step + 1 + ahead) * groups_per_step

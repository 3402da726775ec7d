"""The changes that one verb may make: no handed-in sample is thrown away without a reason that the rules state."""

from collections.abc import Iterator, Set

from headway.broker.schema import RunRules

from .audit import Audit, GroupState
from .model import Model


def judge_worker(before: Audit, after: Audit, model: Model) -> None:
    """Assert that a worker's verb begins groups and fills them; it takes nothing away, unless bytes were damaged."""
    for name in set(before.groups) - model.damaged:
        assert name in after.groups, f"{name} is gone by a worker's verb"
        assert after.groups[name].round == before.groups[name].round, f"{name} begins anew by a worker's verb"
        _judge_payloads(name, before.groups[name], after.groups[name])
    for name in set(after.groups) | set(before.groups):
        was, is_now = (audit.groups[name].state if name in audit.groups else "" for audit in (before, after))
        assert (was == "pinned") == (is_now == "pinned"), f"{name}: {was}, by a worker's verb {is_now}"
    assert (before.settled, before.dropped) == (after.settled, after.dropped)
    assert before.announced_step == after.announced_step


def judge_learner(before: Audit, after: Audit, model: Model, step: int, told: Set[str], done: Set[str]) -> None:
    """Assert that a learner's verb is allowed before `step`.

    `done` has all groups of its lineage, log and cursor, `told` those that it holds to be taken.
    """
    assert after.settled <= done, f"settled, but never trained: {after.settled - done}"
    for name, had in before.groups.items():
        has = after.groups.get(name)
        reasons = [*_reasons(before, after, had, model.rules, step), *(["damaged"] * (name in model.damaged))]
        if has is None:
            is_dropped = model.rules.on_over_bound == "drop" and "over the bound" in reasons
            assert name in done or is_dropped or "damaged" in reasons, f"{name} is gone: {had.fields}"
        elif has.round != had.round:
            assert reasons or name in told, f"{name} begins anew at step {step} for no reason: {had.fields}"
        elif name not in told and "damaged" not in reasons:
            _judge_payloads(name, had, has)
        if has is not None and has.is_trimmed and not had.is_trimmed:
            assert "straggles" in reasons, f"{name} is trimmed: {had.fields}"
            assert model.rules.on_straggler == "trim"


def _judge_payloads(name: str, had: GroupState, has: GroupState) -> None:
    kept = has.of_samples("payload")
    for sample, payload in had.of_samples("payload").items():
        assert kept.get(sample) == payload, f"{name}: sample {sample} was handed in and is gone"


def _reasons(before: Audit, after: Audit, had: GroupState, rules: RunRules, step: int) -> Iterator[str]:
    """Yield reasons for which a group may be generated anew, dropped, or trained without some of its samples."""
    floor, newest = had.number("floor"), had.number("newest") or -1
    if floor is not None and step - floor > rules.max_lag:
        yield "over the bound"
    if floor == step - rules.max_lag and had.state == "open" and rules.on_straggler != "wait":
        yield "straggles"
    announced_before, announced = before.announced_step or 0, after.announced_step or 0
    if newest > min(step, announced if announced < announced_before else step):
        yield "abandoned"
    if had.state == "pinned" and len(had.of_samples("payload")) < had.size and not had.is_trimmed:
        yield "undeliverable"

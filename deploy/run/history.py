"""Events of a run between its steps: learners that went on, steps that they abandoned, updates that were
skipped."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from headway.broker.schema.metrics import StepMetrics


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run, at the step before which it happened."""

    step: int
    incarnation: int
    kind: Literal["start", "restart", "branch", "skipped update"]
    text: str


def happenings(steps: Sequence[StepMetrics]) -> list[Happening]:
    """Return what happened, in the order in which it did; `steps` are all lines of metrics.jsonl."""
    ordered = sorted(steps, key=lambda step: step.incarnation)  # stable: within an incarnation as they were written
    found, last_step, incarnation = [], -1, None
    for step in ordered:
        if step.incarnation != incarnation:
            found.append(_beginning(step, last_step))
            incarnation = step.incarnation
        last_step = step.step
        found.extend(_skipped(step))
    return found


def _beginning(first: StepMetrics, last_step: int) -> Happening:
    """Return how a learner began whose first step is `first`, after one whose last step was `last_step` (-1: none)."""
    learner, abandoned = f"Learner {first.incarnation}", last_step + 1 - first.step
    at = {"step": first.step, "incarnation": first.incarnation}
    if last_step < 0:
        return Happening(kind="start", text=f"{learner} began at step {first.step}.", **at)
    if abandoned <= 0:
        return Happening(kind="restart", text=f"{learner} went on at step {first.step}; no step was lost.", **at)
    steps = f"step {first.step}" if abandoned == 1 else f"steps {first.step} to {last_step}"
    return Happening(kind="branch", text=f"{learner} went back to step {first.step} and trained {steps} anew.", **at)


def _skipped(step: StepMetrics) -> Iterator[Happening]:
    if step.grad_norm is None:
        text = "The gradient was not finite, so the update was skipped."
        yield Happening(step=step.step, incarnation=step.incarnation, kind="skipped update", text=text)

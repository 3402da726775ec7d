"""Steps that train nothing because the rewards of each group are all equal: a warning for logs and terminals."""

from collections.abc import Sequence

from headway.broker.schema.metrics import StepMetrics

STEPS = 3
"""Steps in a row that trained nothing before it is said: one or two may be chance."""


class FlatRewardNews:
    """Remembers whether a reader was told that nothing is trained."""

    def __init__(self) -> None:
        self._is_told = False

    def news(self, steps: Sequence[StepMetrics]) -> str:
        """Returns the warning once, and again only after a step that trained something; else an empty string. `steps`
        are the last ones, in order."""
        text, was_told = flat_reward_text(steps), self._is_told
        self._is_told = bool(text)
        return "" if was_told else text


def flat_reward_text(steps: Sequence[StepMetrics]) -> str:
    """Returns the warning if the last steps of one learner trained nothing, or else an empty string."""
    last = steps[-STEPS:]
    if len(last) < STEPS or len({step.incarnation for step in last}) > 1 or not all(map(_trains_nothing, last)):
        return ""
    return (
        f"Nothing is learned: no group of the last {STEPS} steps has rewards that differ (their mean is"
        f" {last[-1].reward_mean:.3g}), so nothing is trained: a sample is compared with the others of its group."
        " `headway report` shows samples with their rewards. If all fail, take easier prompts or let the reward tell"
        " better answers from worse ones; if all succeed, take harder prompts. A larger learner.group_size helps if an"
        " answer succeeds now and then."
    )


def _trains_nothing(step: StepMetrics) -> bool:
    """Return whether all groups are flat and give no gradient. A critic, a teacher or a loss without a baseline may
    train flat groups."""
    return step.flat_groups == 1 and step.grad_norm == 0

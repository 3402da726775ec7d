"""An environment: it answers each answer of the model."""

from headway.rollout_workers.environments import Episode, Step


class TwoTries:
    """Lets the model answer once more after a wrong answer. A right second answer is worth less than a first one."""

    def __init__(self, discount: float = 0.5) -> None:
        """`discount` is one of `environment.options`."""
        self.max_turns = 2
        self.discount = discount

    def step(self, episode: Episode) -> Step:
        is_right, is_second = episode.score >= 1.0, len(episode.answers) == 2
        if is_right or is_second or episode.finish_reason == "length":
            worth = self.discount if is_second else 1.0
            return Step(reward=worth * episode.score, components={"tries": len(episode.answers)})
        return Step(reward=0.0, says=f"?{episode.prompt.text}")

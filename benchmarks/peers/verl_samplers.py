"""verl's replay buffer, looking more often for samples that have ended. verl loads it in its trainer's process."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

LOOK_S = 0.02
"""Seconds between looks; verl's own are 2, as long as a whole step of a small model."""


class OftenSync(ReplayBuffer):  # type: ignore[misc]  # verl is not in the environment of the type checker
    """The synchronous trainer's buffer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, poll_interval=LOOK_S)

"""The fixed settings of one trial, known to all of its processes."""

from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from headway.deploy.recipe.recipe import Recipe
from headway.learner.checkpoint import CheckpointStore

from .episodes import LONGEST_EPISODE
from .tasks import ALPHABET, LONGEST, OVERWRITTEN_WEIGHTS, SCORER, WEIGHTS
from .user_code import PROMPT_TOKENS

RUN = "chaos"
WORKERS = 4
SCORERS = 2
CAPACITY = 12
"""The number of samples that a worker generates at once."""
GROUP_SIZE = 4
GROUPS_PER_STEP = 4
STEP_S = 0.05
EVALUATED = 6
"""The number of prompts of an evaluation."""
SHARE_OF_STEPS = 0.8
"""The share of a slow trial's time that its steps take; the rest is for outages."""
GROUPS_PER_MINUTE = 240
"""About the number that a disturbed run trains, so that faults hit it to the end."""
EPISODES_A_SAMPLE = 4
"""An agent's episode takes about so many times as long as another sample."""
AGENT_PROCESSES = 2
"""Processes of agents from outside."""
EPISODE_S = 30.0
"""The longest time of an episode, such as of an agent from outside that was killed; then it begins anew."""
SILENT_S = 8.0
"""The time after which a gateway offers an episode again whose agent does not call."""
KEY = "the key of the gateway"
HANGS_AFTER_S = 30.0
ENDLESS = 100_000
"""A number of groups without an end."""
MAX_LAG = 3
LEASE_TTL_S = 2.0
BROKER_TIMEOUT_S = 2.0
"""Shorter than most outages, so that callers see them."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmark."""

    seed: int
    minutes: float
    directory: Path
    groups_per_minute: int = GROUPS_PER_MINUTE
    """The number of groups to train in a minute; where it is smaller than usual, the learner waits between steps."""
    agents: Literal["", "hosted", "outside"] = ""
    """Who plays multi-turn episodes: agents in workers' host processes, or those that ask gateways; empty: nobody."""
    sandbox: str = ""
    """The kind of sandbox in which the agents' tool runs; empty: none."""
    rarely: float = 1.0
    """The factor by which faults of the usual mix are rarer."""
    against: str = ""
    """The protection whose faults strike more often; empty for the usual mix."""
    is_out: bool = False
    """Whether that protection is taken out of the product."""
    is_overwritten: bool = False
    """Whether this is the earlier run, whose name the trial's takes."""

    @property
    def without(self) -> str:
        """Return the protection that is taken out; empty for none."""
        return self.against if self.is_out else ""

    @property
    def groups(self) -> int:
        """Return the number of groups in the data set."""
        if self.is_overwritten:
            return ENDLESS
        return max(8 * GROUPS_PER_STEP, round(self.minutes * self.pace))

    @property
    def pace(self) -> float:
        """Return the number of groups to train in a minute."""
        return self.groups_per_minute / (EPISODES_A_SAMPLE if self.agents else 1)

    @property
    def step_s(self) -> float:
        """Return the least seconds of the learner's step."""
        is_slow = self.pace < GROUPS_PER_MINUTE
        return SHARE_OF_STEPS * 60 * GROUPS_PER_STEP / self.pace if is_slow else STEP_S

    @property
    def overwritten(self) -> Self:
        """Return the earlier run."""
        directory = self.directory / "overwritten"
        return msgspec.structs.replace(self, directory=directory, is_overwritten=True, agents="")

    @property
    def weights_name(self) -> str:
        """Return the name of the one tensor."""
        return OVERWRITTEN_WEIGHTS if self.is_overwritten else WEIGHTS

    @property
    def broadcasts(self) -> bool:
        """Whether workers take part in broadcast groups, in half of the seeds. In the others all of them pull."""
        return not self.against and self.seed % 4 in (1, 2)

    @property
    def appendfsync(self) -> Literal["always", "everysec"]:
        """Return the durability: even seeds risk the last second, odd ones do not."""
        return "always" if self.seed % 2 else "everysec"

    @property
    def has_log(self) -> bool:
        """Whether there is an experience log, which mends faults that other protections miss."""
        return not self.against and self.seed % 4 < 2

    @property
    def reward(self) -> str:
        """Return the reward function's name."""
        return "reward" if self.against else "erratic_reward"

    @property
    def has_scorers(self) -> bool:
        """Whether a reward model judges the samples, too, and workers evaluate."""
        return not self.against and not self.is_overwritten and not self.agents

    @property
    def hangs_after_s(self) -> float:
        """Return the seconds without faults and without a checkpoint after which the run hangs."""
        return HANGS_AFTER_S + (3 * EPISODE_S if self.agents else 0.0)

    @property
    def journal(self) -> Path:
        """Return the file in which agents note what they do."""
        return self.directory / "journal"

    @property
    def recipe(self) -> Recipe:
        """Return the product's own configuration, with doubles where it takes a user's code."""
        longest = LONGEST_EPISODE if self.agents else LONGEST
        return msgspec.convert(
            {
                "run": {"name": RUN, "directory": str(self.directory), "seed": self.seed},
                "model": {"random": {"architecture": "qwen3", "alphabet": ALPHABET, "config": _SMALL}},
                "prompts": {
                    "kind": f"{_USER_CODE}:FinitePrompts",
                    "options": {"size": self.groups},
                    "shuffle": False,
                    "epochs": 1,
                },
                "agent": self._agent,
                "rewards": self._rewards,
                "staleness": {"max_lag": MAX_LAG},
                "learner": {
                    "backend": "benchmarks.chaos.learner:TinyBackend",
                    "steps": 1_000_000,
                    "groups_per_step": GROUPS_PER_STEP,
                    "group_size": GROUP_SIZE,
                    "agreement_bound": 0,  # engine and backend are doubles, which compute nothing alike
                },
                "optimizer": {"learning_rate": 0.1},
                "checkpoint": {"every_steps": 1 if self.agents else 3, "log_bytes": 1 << 30 if self.has_log else 0},
                "sampling": {"max_new_tokens": longest},
                "engine": {
                    "kind": "benchmarks.chaos.worker:SlowEngine",
                    "max_concurrent": CAPACITY,
                    "max_model_len": PROMPT_TOKENS + longest,
                },
                "workers": {"count": WORKERS, "heartbeat_s": 0.4, "segment_tokens": 8, "segment_s": 1.0},
                "weights": {"host": "127.0.0.1", "broadcast_timeout_s": 2.0, "poll_s": 0.1},
                "broker": {"lease_ttl_s": LEASE_TTL_S},
                "evaluation": {
                    "prompts": EVALUATED if self.has_scorers else 0,
                    "every_steps": 30,
                    "where": "workers",
                    "hold_s": 2.0,
                },
            },
            Recipe,
        )

    @property
    def _rewards(self) -> list[dict[str, Any]]:
        """Agents give their own."""
        if self.agents:
            return []
        own = {"kind": f"{_USER_CODE}:{self.reward}", "signature": "verl", "deadline_s": 2.0}
        return [own, *([{"kind": SCORER, "path": "tiny", "deadline_s": 2.0}] if self.has_scorers else [])]

    @property
    def _agent(self) -> dict[str, Any]:
        if not self.agents:
            return {}
        hosted = {
            "kind": "benchmarks.chaos.agent:Agent",
            "options": {"journal": str(self.journal), "sandbox": self.sandbox},
        }
        return {
            **(hosted if self.agents == "hosted" else {"kind": "external"}),
            "format": {"kind": "plain", "options": {"call_begin": "[", "call_end": "]"}},
            "episode_s": EPISODE_S,
            "episodes_per_place": 1,
        }

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.recipe.run_directory / "checkpoints", keep=2)

    @property
    def trails(self) -> Path:
        """Return the directory of all learners' trails."""
        return self.directory / "trails"


_USER_CODE = "benchmarks.chaos.user_code"
_SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": PROMPT_TOKENS + LONGEST + LONGEST_EPISODE,
}
"""The configuration of a model that never runs: only its tokenizer does."""

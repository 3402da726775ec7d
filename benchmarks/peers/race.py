"""The definition of the race, which all drivers read: a recipe of Headway with overrides, and its warmed-up model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.stage_output import SFT

ON_GPU = ("learner.device=cuda", "engine.kind=vllm", "engine.device=cuda", "weights.transport=ipc")
ON_CPU = ("learner.device=cpu", "engine.kind=embedded", "engine.device=cpu", "engine.options={}")
ENGINES = 4
"""Headway's engines on the second of two GPUs."""
ENGINES_BESIDE = 3
"""Headway's engines on one GPU, beside its learner."""
SHARING_GPU = (
    *ON_GPU,
    "weights.staging=device",
    "engine.options.gpu_memory_utilization=0.05",
    "engine.options.kv_cache_memory_bytes=8589934592",
)
"""Engines that are told the size of their KV cache start together, and while the learner loads."""
SETTINGS = {
    0: ("engine.max_concurrent=128",),
    1: (*SHARING_GPU, f"workers.count={ENGINES_BESIDE}"),
    2: (*SHARING_GPU, f"workers.count={ENGINES}"),
}
"""Headway's own settings by the number of GPUs. On CPUs each of two workers has half of a step in its engine. On one
GPU learner and engines share it, and the engines together take less of its memory than TRL leaves to its own by
default. Of two GPUs the learner has one and four engines the other."""
HEADWAY = "headway"
"""The name of Headway's runs."""
SHORT, LONG_TAILED, AGENT = "short", "long-tailed", "agent"
GRPO = ("group_mean_std", "ppo_clip", "token_mean")
"""The composition that both have: the preset `grpo`, TRL's `loss_type="dapo"`."""
LIKE_PRESET = ("algorithm.objective.anchor=behavior", "algorithm.corrections=[]", "optimizer.warmup_steps=0")
"""Overrides with which a recipe has the preset's own loss, the ratio to the policy that sampled, as TRL's asynchronous
trainer and verl have it, so that no forward pass comes before a step; and the peers' learning rate, which is constant
from the first update on."""
OWN = {(2, SHORT): ("staleness.max_lag=1",), (2, LONG_TAILED): ("staleness.ahead=1",)}
"""Overrides of Headway's run alone, by the number of GPUs and the task. A lag of so many steps costs about as many
steps of progress, as `benchmarks/RESULTS.md` shows. With a GPU to themselves Headway's engines are fast enough to give
some speed away for fresher samples. Long-tailed samples keep the recipe's bound, which the longest of them need, and
are begun one step ahead. A peer has the recipe's own bound, where it has any."""
ELSEWHERE = {"run", "model", "sft", "stages", "broker", "evaluation", "checkpoint"}
"""Sections of a recipe that no contestant's figures depend on: places, the warm-up and the evaluation."""


class Task(msgspec.Struct, frozen=True):
    """A recipe, and overrides of what in it is not as the race needs it."""

    recipe: str
    overrides: tuple[str, ...] = ()


TASKS = {
    SHORT: {"cpu": Task("arithmetic.yaml"), "cuda": Task("smollm2-reasoning-gym.yaml", LIKE_PRESET)},
    LONG_TAILED: {
        "cpu": Task(str(Path(__file__).with_name("long_tailed.yaml"))),
        "cuda": Task(
            str(Path(__file__).with_name("long_tailed_gpu.yaml")),
            (*LIKE_PRESET, "learner.steps=40", "evaluation.prompts=512"),
        ),
    },
    AGENT: {
        "cpu": Task(str(Path(__file__).with_name("agent_gpu.yaml")), (*LIKE_PRESET, *ON_CPU)),
        "cuda": Task(str(Path(__file__).with_name("agent_gpu.yaml")), LIKE_PRESET),
    },
}
"""The recipe of each task on CPUs and on GPUs."""


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """The same race for every driver."""

    recipe: str
    """A path, or the name of a recipe that ships."""
    overrides: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """Overrides of Headway's run alone, which the user's overrule."""
    output: str
    """The absolute path of the directory of all models and runs."""
    gpus: int = 0
    """The number of GPUs; 0 on a CPU."""
    second_gpu: str = "1"
    """The name of the second one, as CUDA_VISIBLE_DEVICES has it."""

    @property
    def on_gpu(self) -> bool:
        """Whether it trains and generates on GPUs."""
        return self.gpus > 0

    @property
    def model(self) -> Path:
        """The directory of the warmed-up model from which all start."""
        return Path(self.output) / SFT

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """The overrides of the recipe, the user's last."""
        devices = ",".join([self.second_gpu] * ENGINES)
        on_second = (f"workers.devices=[{devices}]",) if self.gpus == 2 else ()
        return (*SETTINGS[self.gpus], *on_second, *self.overrides)

    @property
    def samples_per_step(self) -> int:
        """The number of samples that one step trains."""
        learner = self.load().learner
        return learner.groups_per_step * learner.group_size

    def settings(self) -> dict[str, Any]:
        """Return what decides a run's figures, by key: the recipe's settings, but for where it runs and what it was
        warmed up with, and the number of GPUs."""
        sections = json.loads(msgspec.json.encode(self.load()))  # as they are read back
        found: dict[str, Any] = {"gpus": self.gpus, "own": list(self.own)}
        for section in sorted(sections.keys() - ELSEWHERE):
            found |= _flat(sections[section], section)
        return {key: value for key, value in found.items() if key != "workers.devices"}

    def load(self, overrides: Sequence[str] = ()) -> Recipe:
        """Return the recipe. Raises ConfigError, also for a loss that TRL does not have in the same form."""
        recipe = load_recipe(self.recipe, [*self.all_overrides, *overrides])
        loss = recipe.algorithm
        found = (loss.advantage.kind, loss.objective.kind, loss.aggregation.kind)
        more = (loss.kl.coefficient, loss.entropy_coefficient, loss.dynamic_sampling)
        if found != GRPO or loss.corrections or any(more):
            raise ConfigError(f"algorithm: {found} is not the loss of the race; leave it at algorithm.preset=grpo.")
        return recipe


def _flat(value: Any, key: str) -> dict[str, Any]:
    """Return the leaves of a mapping by their whole keys."""
    if not isinstance(value, dict):
        return {key: value}
    names = {f"{key}.{name}" if key else name: inner for name, inner in value.items()}
    return {whole: leaf for name, inner in names.items() for whole, leaf in _flat(inner, name).items()}

"""Runtimes load the models of scorers and run them; a recipe chooses one by `scorers.engine.kind`.

    open_runner ── ScoringModel, ScorersConfig ──► one of the two runtimes ──► Runner, which `serving.py` asks

`transformers_runtime.py` runs on CPUs and GPUs, one padded batch at a time; `vllm_runtime.py` packs batches and keeps
the prompts that the samples of a group share. Each states its abilities here before it loads a model, so that no other
code depends on its name. This module imports neither torch nor a library of theirs.

The invariant: all runtimes give a request the same scores, but for rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.broker.user_code.import_paths import ImportRoots, load, load_custom
from headway.broker.user_code.kinds import unknown_kind, unknown_option
from headway.rollout_workers.config import ScorerEngineConfig, ScorersConfig
from headway.rollout_workers.engines.abilities import EMBEDDED, BuiltInEngine, gpus_with, takes_all
from headway.rollout_workers.engines.abilities import VLLM as ENGINE

from . import Runner, ScoringModel


@dataclass(frozen=True, kw_only=True)
class RuntimeAbilities:
    """The abilities of a runtime. The defaults are what every runtime promises, and those of a user's own, so a runtime
    states only what it lacks or adds."""

    options: tuple[str, ...] | None = None
    """The names that `scorers.engine.options` may have; None: the runtime itself checks them as it starts."""
    any_temperature: bool = True
    """Whether its teachers give logprobs at every temperature. Those of other runtimes give them at 1 alone."""
    gpu_options: tuple[str, ...] = ()
    """The names in `scorers.engine.options` whose product is the number of GPUs of one process."""
    step_tokens: Mapping[str, int] = field(default_factory=dict)
    """By the kind of scorer, the most tokens that go through the model at once; without one, all of a batch do."""
    keeps_cache: bool = False
    """Whether it holds memory for the keys and values of `cache_tokens` tokens."""
    takes_stored: Callable[[str, object], bool] = takes_all
    """Return whether the runtime takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own runtime knows what its
    options do."""


BLOCK_TOKENS = 256
"""At least the tokens of a block of any runtime's cache. One block is never used, and one is not full."""


def cache_tokens(batch_tokens: int, most_tokens: int) -> int:
    """Return the number of tokens whose keys and values a runtime with a cache holds: those of a batch, and of the
    longest request besides, which may be a batch of its own."""
    return batch_tokens + most_tokens + 2 * BLOCK_TOKENS


TRANSFORMERS = BuiltInEngine(
    opener="headway.rollout_workers.scorers.transformers_runtime:open_transformers",
    abilities=RuntimeAbilities(options=()),
    remedy=EMBEDDED.remedy,
    examine=EMBEDDED.examine,
)


STEP_TOKENS = {"reward_model": 8192, "teacher": 2048}
"""The most tokens that go through a model at once. A teacher's logits of so many tokens lie in memory twice."""

VLLM = BuiltInEngine(
    opener="headway.rollout_workers.scorers.vllm_runtime:open_vllm",
    abilities=RuntimeAbilities(
        any_temperature=False,
        gpu_options=ENGINE.abilities.gpu_options,
        step_tokens=STEP_TOKENS,
        keeps_cache=True,
        takes_stored=ENGINE.abilities.takes_stored,
    ),
    package=ENGINE.package,
    remedy=ENGINE.remedy,
    examine=ENGINE.examine,
)

KINDS = ("reward_model", "teacher")
KEY = "scorers.engine.kind"

RUNTIMES: dict[str, BuiltInEngine[RuntimeAbilities]] = {"transformers": TRANSFORMERS, "vllm": VLLM}


def abilities_of(config: ScorerEngineConfig) -> RuntimeAbilities:
    """Return the abilities of the runtime `config.kind`. A user's own, which is not imported for this, counts as one
    that keeps every promise."""
    return RUNTIMES[config.kind].abilities if config.kind in RUNTIMES else RuntimeAbilities()


def gpus_of(config: ScorerEngineConfig) -> int:
    """Return how many GPUs one process takes. Raises ConfigError for a size that is no positive integer."""
    return gpus_with(config.options, abilities_of(config).gpu_options, "scorers.engine.options")


def check_options(config: ScorerEngineConfig, where: str = "scorers.engine") -> None:
    """Raise ConfigError for the first of the options that the runtime does not have, if it states which it has.
    `where`: the engine's place in the recipe."""
    if (known := abilities_of(config).options) is None:
        return
    for name in config.options:
        if name not in known:
            keys = [f"scorers.{key}" for key in ScorersConfig.__struct_fields__ if key != "engine"]
            raise unknown_option(name, known, f"{where}.options", of=f"{KEY}={config.kind}", keys=keys)


def check_installed(kind: str) -> None:
    """Raise ConfigError, with the remedy, if the package of the runtime `kind` is missing."""
    if known := RUNTIMES.get(kind):
        known.check_installed(f"{KEY}={kind}")


def open_runner(
    kind: str,
    path: str,
    config: ScorersConfig,
    *,
    key: str,
    policy: Path | None = None,
    most_tokens: int | None = None,
    roots: ImportRoots | None = None,
) -> Runner:
    """Load the model in `path`, a directory or a hub id, which the recipe names under `key`.

    `policy`: the directory with the tokenizer of the model that is trained, which the scorer's must equal.
    `most_tokens`: the most tokens of prompt and response that it will be asked for. `roots`: the modules below which a
    user's own runtime may be imported; by default Headway's own and the working directory's. Raises UnfitModelError for
    a model that is missing, of another kind or of another vocabulary, and ConfigError for a runtime that cannot be
    opened.
    """
    from .model_checks import check_reads_to_the_end, check_same_tokenizer

    assert kind in KINDS, kind
    engine = config.engine
    if engine.kind not in RUNTIMES and ":" not in engine.kind:
        raise unknown_kind(engine.kind, RUNTIMES, KEY)
    check_installed(engine.kind)
    check_options(engine)
    if kind == "reward_model" and engine.kind in RUNTIMES:
        check_reads_to_the_end(path, key)
    if policy is not None:
        check_same_tokenizer(path, policy, key)
    asked = ScoringModel(kind=kind, path=path, key=key, policy=policy, most_tokens=most_tokens)

    def opened(opener: Any) -> Runner:
        runner: Runner = opener(asked, config)
        return runner

    if known := RUNTIMES.get(engine.kind):
        return opened(load(known.opener, KEY))
    own: Runner = load_custom(engine.kind, Runner, KEY, opened, roots=roots or ImportRoots())
    return own

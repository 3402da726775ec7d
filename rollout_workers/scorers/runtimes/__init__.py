"""Runtimes load the models of scorers and run them; a recipe chooses one by `scorers.engine.kind`.

    open_runner ── ScoringModel, ScorersConfig ──► one of the two runtimes ──► Runner, which `serving.py` asks

`base.py` of the room above has the seam, `Runner`. `transformers_runtime.py` runs on CPUs and GPUs, one padded batch at
a time; `vllm_runtime.py` packs batches and keeps the prompts that the samples of a group share. `abilities.py` states
what each can do; it imports neither torch nor a library. `RUNTIMES` registers them. `model_checks.py` reads what a
model's files say, for both.

The invariant: all runtimes give a request the same scores, but for rounding.
"""

from pathlib import Path
from typing import Any

from headway.broker.user_code.import_paths import ImportRoots, load, load_custom
from headway.broker.user_code.kinds import unknown_kind, unknown_option
from headway.rollout_workers.config import ScorerEngineConfig, ScorersConfig
from headway.rollout_workers.engines.abilities import KnownEngine, gpus_with
from headway.rollout_workers.scorers.base import Runner, ScoringModel

from .abilities import TRANSFORMERS, VLLM, RuntimeAbilities

KINDS = ("reward_model", "teacher")
KEY = "scorers.engine.kind"

RUNTIMES: dict[str, KnownEngine[RuntimeAbilities]] = {"transformers": TRANSFORMERS, "vllm": VLLM}


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

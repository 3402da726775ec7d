"""For every seam, Headway refuses a user's class that lacks one method, in one paragraph that names the method."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import check_offers
from headway.deploy.launch.local_run import open_launcher
from headway.deploy.observe.sinks import make_sink
from headway.deploy.recipe.recipe import LauncherConfig, SinkConfig
from headway.learner.backends import open_backend
from headway.learner.config import ModelConfig, OptimizerConfig, PromptsConfig, SftPhaseConfig, StageConfig
from headway.learner.data.examples import open_examples
from headway.learner.data.prompts import open_source
from headway.learner.stages import open_stage
from headway.learner.stages.base import Stage
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.config import EngineConfig, EnvironmentConfig, RewardConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.environments import open_environment
from headway.rollout_workers.rewards import open_reward
from headway.weightsync.limits import Deadline
from headway.weightsync.transports.broadcast import form_group

SOURCE = """
import msgspec
from {module} import {seam}

class Lacking:
    class Options(msgspec.Struct):
        pass

    def __init__(self, *arguments, head="", **options):
        pass

for base in {seam}.__mro__:
    for name in (*vars(base), *getattr(base, "__annotations__", ())):
        if not name.startswith("_") and name != "{method}":
            setattr(Lacking, name, 1)

class Inheriting({seam}):
    Options = Lacking.Options

    def __init__(self, *arguments, head="", **options):
        pass

for name in vars(Lacking):
    if not name.startswith("_") and name != "Options":
        setattr(Inheriting, name, 1)
"""

MODEL, OPTIMIZER = ModelConfig(path="unread"), OptimizerConfig()

OPENERS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "headway.rollout_workers.engines.base:Engine": (
        "generate",
        "engine.kind",
        lambda own: open_engine(EngineConfig(kind=own), Path(), seed=0),
    ),
    "headway.learner.backends.base:Backend": (
        "named_tensors",
        "learner.backend",
        lambda own: open_backend(own, MODEL, OPTIMIZER),
    ),
    "headway.learner.backends.base:ValueBackend": (
        "values",
        "learner.backend",
        lambda own: open_backend(own, MODEL, OPTIMIZER, head="value"),
    ),
    "headway.weightsync.transports.base:BroadcastGroupTransport": (
        "start",
        "weights.transport",
        lambda own: form_group(own, None, 0, 1, "127.0.0.1", Deadline(5), ImportRoots((own,))),  # type: ignore[arg-type]
    ),
    "headway.learner.data.prompts.base:PromptSource": (
        "held_out",
        "prompts.kind",
        lambda own: open_source(PromptsConfig(kind=own), seed=0),
    ),
    "headway.learner.stages.base:Stage": (
        "save",
        "stages[0].kind",
        lambda own: open_stage(StageConfig(kind=own), None, "stages[0]"),  # type: ignore[arg-type]
    ),
    "headway.rollout_workers.environments:Environment": (
        "step",
        "environment.kind",
        lambda own: asyncio.run(open_environment(EnvironmentConfig(kind=own), ImportRoots((own,)))),
    ),
    "headway.rollout_workers.agents.conversation:ChatFormat": (
        "bridge",
        "agent.format.kind",
        lambda own: open_format(Path(), (0,), own, roots=ImportRoots((own,))),
    ),
    "headway.deploy.observe.sinks.base:MetricSink": (
        "write",
        "metrics[1].kind",
        lambda own: make_sink(SinkConfig(kind=own), "metrics[1]"),
    ),
    "headway.deploy.launch.base:Launcher": (
        "start",
        "launcher.kind",
        lambda own: open_launcher(LauncherConfig(kind=own)),
    ),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's directory."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["Lacking", "Inheriting"])
@pytest.mark.parametrize("path", OPENERS)
def test_a_class_that_lacks_a_method_is_refused_by_its_name(home: Path, path: str, name: str) -> None:
    module, _, seam = path.partition(":")
    method, where, opener = OPENERS[path]
    own = f"own_{seam.lower()}_{name.lower()}"
    (home / f"{own}.py").write_text(SOURCE.format(module=module, seam=seam, method=method))
    with pytest.raises(HeadwayError) as caught:
        opener(f"{own}:{name}")
    assert str(caught.value) == (
        f"{where}: '{own}:{name}' makes a {name}, which lacks {method}; what it must offer stands in {path}."
    )


@pytest.mark.parametrize(
    ("opener", "words"),
    [
        (
            lambda own: asyncio.run(open_reward([RewardConfig(kind=own)], ImportRoots((own,)))),
            "rewards: own_function:nothing(path, seed) has neither of the signatures that can be called. verl: ",
        ),
        (
            lambda own: next(open_examples(SftPhaseConfig(kind=own), seed=0)),
            "sft.phases.kind: 'own_function:nothing' returned a NoneType, which yields nothing; what it must yield",
        ),
    ],
    ids=["reward", "examples"],
)
def test_a_function_that_does_not_fit_is_told_what_would(home: Path, opener: Callable[[str], Any], words: str) -> None:
    (home / "own_function.py").write_text("def nothing(path, seed):\n    pass\n")
    with pytest.raises(HeadwayError) as caught:
        opener("own_function:nothing")
    assert str(caught.value).startswith(words)


def test_what_a_wrapper_hands_on_is_offered() -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> object:
            return name

    check_offers(Wrapper(), Stage, "own:Wrapper", "stages[0].kind")

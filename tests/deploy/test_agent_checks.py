"""An agent that no worker of this machine could open, or whose format does not fit the model, is refused before a run
starts anything."""

from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.preflight import check_start, tried
from headway.deploy.recipe.resolve import load_recipe
from headway.rollout_workers.agents.external import KEY

OWN = """
class NoMethods:
    pass

class Env:
    def reset(self):
        return "x"

async def rollout(episode, task):
    return 1.0

async def alone(episode):
    return 1.0
"""
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "file": (("agent.kind=missing:rollout",), "agent.kind: .*missing"),
    "name": (("agent.kind=own_agent:nothing",), "agent.kind: module 'own_agent' has no 'nothing'"),
    "methods": (("agent.kind=own_agent:NoMethods",), "agent.kind: 'own_agent:NoMethods' is no agent: write async def"),
    "signature": (("agent.kind=own_agent:alone",), r"'own_agent:alone' cannot be called as rollout\(episode, task\)"),
    "factory": (
        ("agent.kind=environment_factory", "agent.options={factory: 'own_agent:NoMethods'}"),
        r"agent.options.factory: NoMethods lacks reset\(\)",
    ),
    "environment": (
        ("agent.kind=environment", "agent.options={environment: 'own_agent:Env'}"),
        r"agent.options.environment: Env lacks step\(\)",
    ),
    "program": (
        ("agent.kind=command", "agent.options={command: [no-such-agent]}"),
        "agent.options.command: there is no program 'no-such-agent' on this machine",
    ),
    "sandbox": (
        (
            "agent.kind=python_math",
            "agent.options={sandbox: bubblewrap, sandbox_options: {bubblewrap_command: no-bwrap}}",
        ),
        "The sandbox bubblewrap needs the program no-bwrap, which is not installed: apt install bubblewrap",
    ),
    "corpus": (
        ("agent.kind=retrieval", "agent.options={path: nothing.jsonl}"),
        "agent.options.path: nothing.jsonl cannot be read",
    ),
    "server": (
        ("agent.kind=openenv", "agent.options={base_url: 'http://127.0.0.1:9'}"),
        "agent.kind=openenv: ws://127.0.0.1:9/ws cannot be reached",
    ),
    "key": (("agent.kind=external",), f"set the environment variable {KEY} of the workers"),
}
NO_OPTIONS = ("agent.options={}",)


@pytest.fixture
def own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY, raising=False)
    (tmp_path / "own_agent.py").write_text(OWN)
    return tmp_path


def check(*overrides: str, has_workers: bool = True) -> None:
    recipe = load_recipe("agent-arithmetic.yaml", (*NO_OPTIONS, *overrides))
    check_start(recipe, has_workers=has_workers, is_new=True, say=lambda _: None)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_agent_that_cannot_be_opened_is_refused(fault: str, own_agent: Path) -> None:
    overrides, told = FAULTS[fault]
    with pytest.raises(ConfigError, match=told):
        check(*overrides)
    assert [path.name for path in own_agent.iterdir() if path.name != "__pycache__"] == ["own_agent.py"]


def test_an_agent_that_can_be_opened_passes(own_agent: Path) -> None:
    check("agent.kind=own_agent:rollout")
    check("agent.kind=calculator")


def test_a_learner_alone_needs_no_agent(own_agent: Path) -> None:
    check("agent.kind=missing:rollout", has_workers=False)


def test_a_format_that_does_not_fit_the_model_is_told_at_once(own_agent: Path) -> None:
    recipe = load_recipe("agent-arithmetic.yaml")
    assert tried(recipe, lambda _: None) == recipe
    recipe = load_recipe("agent-arithmetic.yaml", ("agent.format={kind: chatml}",))
    with pytest.raises(ConfigError, match=r"agent.format.kind=chatml: the model's tokenizer lacks <\|im_start\|>"):
        tried(recipe, lambda _: None)
    assert tried(recipe, lambda _: None, calls=False) == recipe

"""The Python of the guides, run as a reader would run it: written into a module that a recipe names."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe, recipe_to_bytes
from headway.deploy.run.resumable_keys import ANEW, FIXED, RAISED
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask
from headway.rollout_workers.agents.kinds import KINDS, open_agent
from headway.rollout_workers.config import EnvironmentConfig
from headway.rollout_workers.environments import Episode, Step, open_environment
from headway.rollout_workers.rewards import open_reward

from .pages import ROOT, whole_recipe

GUIDES = ROOT / "docs" / "guides"
RECIPE = re.compile(r"^```yaml\n(.*?)^```", re.M | re.S)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
SEVEN = Prompt(group="0-1", token_ids=[1], text="3+4=", ground_truth="7", data_source="sums", num_samples=1)


def example(guide: str, defines: str) -> str:
    """Return the block of Python in a guide that defines the name."""
    (block,) = [block for block in PYTHON.findall((GUIDES / guide).read_text()) if f" {defines}" in block]
    return str(block)


def episode(*answers: str, score: float, finish_reason: str = "stop") -> Episode:
    rewards = (0.0,) * (len(answers) - 1)
    return Episode(prompt=SEVEN, answers=answers, rewards=rewards, score=score, finish_reason=finish_reason, room=100)


async def test_the_environment_of_the_guide_plays_two_turns(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(example("environments.md", "Bounds"))
    config = EnvironmentConfig(kind="my_env:Bounds", options={"turns": 2, "discount": 0.5})
    environment = await open_environment(config, ImportRoots(directory=tmp_path))
    try:
        assert environment.max_turns == 2
        assert await environment.step(episode("5", score=0.0)) == Step(reward=0.0, says="\nToo small:\n")
        assert await environment.step(episode("x", score=0.0)) == Step(reward=0.0, says="\nNot right:\n")
        assert await environment.step(episode("5", "7", score=1.0)) == Step(reward=0.5, components={"turns": 2})
        assert await environment.step(episode("7", score=1.0)) == Step(reward=1.0, components={"turns": 1})
        cut_off = episode("5", score=0.0, finish_reason="length")
        assert await environment.step(cut_off) == Step(reward=0.0, components={"turns": 1})
    finally:
        await environment.close()


def test_the_tables_of_the_guide_have_every_field_of_an_episode_and_a_step() -> None:
    page = (GUIDES / "environments.md").read_text()
    for struct, title in ((Episode, "### Episode"), (Step, "### Step")):
        section = page.split(title)[1].split("\n#")[0]
        assert set(re.findall(r"^\| `(\w+)`", section, re.M)) == set(struct.__struct_fields__)


def recipes(guide: str, directory: Path) -> list[Recipe]:
    """Return the recipes in a guide, each completed by the keys that it leaves to the reader."""
    path = directory / "own.yaml"
    loaded = []
    for block in RECIPE.findall((GUIDES / guide).read_text()):
        path.write_text(whole_recipe(block))
        loaded.append(load_recipe(path))
    return loaded


def test_the_overrides_of_a_stage_are_taken(tmp_path: Path) -> None:
    recipe, *others = recipes("stages.md", tmp_path)
    names = [[stage.name for stage in other.plan] for other in others]
    assert names == [
        ["sft"],
        ["warm-up", "teacher", "student"],
    ]
    assert [stage.kind for stage in recipe.plan] == ["sft", "rl"]
    lines = (GUIDES / "stages.md").read_text().splitlines()
    overrides = [
        shlex.split(line, comments=True)[-1] for line in lines if line.startswith("headway run ") and "stages" in line
    ]
    named = tmp_path / "named.yaml"
    named.write_bytes(recipe_to_bytes(recipe))
    by_name, by_number, without = [load_recipe(named, [override]) for override in overrides]
    assert [phase.max_steps for phase in by_name.warm_up] == [200]
    assert by_number == by_name
    assert not without.warm_up


@pytest.mark.parametrize(
    ("guide", "stages"),
    [
        ("preferences.md", [["dpo"], ["kto"]]),
        ("reward-models.md", [["sft", "rl"], ["sft", "rl"], ["reward_model"], ["reward_model", "rl"], ["distill"]]),
    ],
)
def test_the_recipes_of_other_stages_are_taken(guide: str, stages: list[list[str]], tmp_path: Path) -> None:
    assert [[stage.name for stage in recipe.plan] for recipe in recipes(guide, tmp_path)] == stages


async def test_the_rewards_of_the_guide_score_a_response(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(example("own-task.md", "compute_score"))
    (recipe,) = recipes("own-task.md", tmp_path)
    reward = await open_reward(recipe.rewards, ImportRoots(directory=tmp_path))
    try:
        right = await reward.score(SEVEN, "3 + 4 = 7. The answer is 7.", "stop")
        wrong = await reward.score(SEVEN, "The answer is 8.", "stop")
        silent = await reward.score(SEVEN, "x" * 1000, "length")
    finally:
        await reward.close()
    assert right.components == {"compute_score": 1.0, "compute_score/answered": 1.0, "brevity": 1 - 27 / 2000}
    assert wrong.components["compute_score"] == 0.1
    assert (silent.total, silent.components["compute_score/answered"]) == (0.1 * 0.5, 0.0)


def test_the_overrides_of_the_guide_are_taken(tmp_path: Path) -> None:
    recipes("own-task.md", tmp_path)
    lines = (GUIDES / "own-task.md").read_text().splitlines()
    overrides = [shlex.split(line)[3:] for line in lines if line.startswith("headway run own.yaml ")]
    steps, weight = (load_recipe(tmp_path / "own.yaml", each) for each in overrides)
    assert (steps.learner.steps, steps.staleness.max_lag) == (500, 8)
    assert (weight.rewards[1].weight, weight.algorithm.preset) == (0.2, "grpo")


def test_the_guide_to_resuming_names_every_key_that_may_not_change_freely() -> None:
    rows = re.findall(r"^\| (`.*`) \| (.+) \|$", (GUIDES / "resume.md").read_text(), re.M)
    classes = {"to a larger value": RAISED, "with `--rewind-to STEP --regenerate`": ANEW, "never": FIXED}
    named = {
        when: {key for keys, told in rows if told == when for key in re.findall(r"`(.+?)`", keys)} for when in classes
    }
    assert named == {when: set(keys) for when, keys in classes.items()}


async def test_the_agent_of_the_guide_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def create(model: str, messages: list[dict[str, Any]]) -> Any:
        asked.append(list(messages))
        message = SimpleNamespace(content="It is 7." if len(messages) > 1 else "It is 8.")
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    def client(base_url: str, api_key: str) -> Any:
        assert (base_url, api_key) == ("http://127.0.0.1:1/v1", "key")
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=client))
    (tmp_path / "my_agent.py").write_text(example("agents.md", "rollout"))
    monkeypatch.syspath_prepend(tmp_path)
    agent = open_agent("my_agent:rollout", {}, ImportRoots(directory=tmp_path))
    task = AgentTask(id="0-1", text="3+4=", messages=[{"role": "user", "content": "3+4="}], ground_truth="7")
    assert await agent.rollout(AgentEpisode("http://127.0.0.1:1/v1", "key", _refuse), task) == 1.0
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


async def _refuse(path: str, asked: Any) -> Any:
    raise AssertionError(path)


def test_the_guide_to_agents_names_every_kind() -> None:
    table = (GUIDES / "agents.md").read_text().split("## Kinds of agents")[1].split("\n#")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    assert set(named) == set(KINDS)

"""The Python of the guides, run as a reader would run it: written into a module that a recipe names."""

import re
from pathlib import Path

from broker.schema import Prompt
from broker.user_code.roots import ImportRoots
from rollout_workers.config import EnvironmentConfig
from rollout_workers.environments import Episode, Step, open_environment

from .pages import ROOT

GUIDES = ROOT / "docs" / "guides"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
SEVEN = Prompt(group="0-1", token_ids=[1], text="3+4=", ground_truth="7", data_source="sums", num_samples=1)


def example(guide: str, defines: str) -> str:
    """The block of Python in a guide that defines the name."""
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

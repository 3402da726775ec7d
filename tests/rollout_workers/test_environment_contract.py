"""Every environment keeps these promises, the built-in ones and a user's own, and a recipe chooses among them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.config import EnvironmentConfig
from headway.rollout_workers.environments import Environment, Episode, open_environment
from headway.rollout_workers.rewards.base import RewardError, UnscoredError

OWN = '''
import os
import time

import numpy as np

from headway.rollout_workers.environments import Step


class Countdown:
    """Says how many turns are left, as tokens."""

    def __init__(self, turns=3):
        self.max_turns = turns

    def step(self, episode):
        left = self.max_turns - len(episode.answers)
        if left and episode.finish_reason == "stop":
            return Step(reward=0.0, says=(left,) * left)
        return Step(reward=episode.score + sum(episode.rewards), components={"turns": len(episode.answers)})


class Later(Countdown):
    async def step(self, episode):
        return super().step(episode)


class Fails(Countdown):
    def step(self, episode):
        if episode.answers[-1] == "exit":
            os._exit(0)
        return {"hang": lambda: time.sleep(600), "nan": lambda: Step(reward=float("nan")), "none": lambda: None}[
            episode.answers[-1]
        ]()


class Measured(Countdown):
    def step(self, episode):
        components = {"ok": np.bool_(True), "half": np.array(0.5), "judge": float("nan"), "note": "x", "far": 10**400}
        return Step(reward=np.float32(0.5), components=components)


class Talks(Countdown):
    def step(self, episode):
        says = {"long": "x" * 50_000_000, "fits": "x" * 20, "ids": (7,) * 21}[episode.answers[-1]]
        return Step(reward=float(episode.finish_reason == "length"), says=says, components={"turns": 1})


class TalksLater(Talks):
    async def step(self, episode):
        return super().step(episode)


class Endless(Countdown):
    def __init__(self):
        self.max_turns = 0
'''
CONFIGS = {
    "single_turn": EnvironmentConfig(),
    "second_try": EnvironmentConfig(kind="second_try", options={"hint": "Again: {prompt}", "discount": 0.25}),
    "own": EnvironmentConfig(kind="countdown:Countdown", options={"turns": 2}),
    "own coroutine": EnvironmentConfig(kind="countdown:Later"),
}


@pytest.fixture
def roots(tmp_path: Path) -> ImportRoots:
    """Return a directory of the user's with an environment in it."""
    (tmp_path / "countdown.py").write_text(OWN)
    return ImportRoots(directory=tmp_path)


@pytest.fixture(params=CONFIGS)
async def environment(request: pytest.FixtureRequest, roots: ImportRoots) -> AsyncIterator[Environment]:
    opened = await open_environment(CONFIGS[request.param], roots)
    yield opened
    await opened.close()
    await opened.close()


def episode(*answers: str, score: float = 0.0, finish_reason: str = "stop", room: int = 100) -> Episode:
    prompt = Prompt(group="0-1", token_ids=[1], text="3+4=", ground_truth="7", data_source="sums", num_samples=1)
    return Episode(
        prompt=prompt,
        answers=answers,
        rewards=(0.0,) * (len(answers) - 1),
        score=score,
        finish_reason=finish_reason,
        room=room,
    )


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
async def test_an_episode_ends_within_its_turns_and_so_does_one_without_room(
    environment: Environment, score: float
) -> None:
    assert environment.max_turns >= 1
    answers = ["8"] * environment.max_turns
    assert not (await environment.step(episode(*answers, score=score))).says
    assert not (await environment.step(episode("8", score=score, finish_reason="length", room=0))).says


async def test_it_keeps_nothing_between_two_turns(environment: Environment) -> None:
    """Another worker may play the next turn, and one environment plays many episodes at once."""
    asked = [episode("8", score=score) for score in (0.0, 1.0)] * 4
    at_once = await asyncio.gather(*map(environment.step, asked))
    one_by_one = [await environment.step(one) for one in reversed(asked)][::-1]
    assert [msgspec.to_builtins(step) for step in at_once] == [msgspec.to_builtins(step) for step in one_by_one]


async def test_a_single_turn_is_worth_its_score() -> None:
    step = await (await open_environment(EnvironmentConfig())).step(episode("7", score=0.75))
    assert (step.reward, step.says, step.components) == (0.75, "", {})


async def test_a_wrong_answer_gets_a_second_try_that_is_worth_less() -> None:
    tries = await open_environment(CONFIGS["second_try"])
    right = await tries.step(episode("7", score=1.0))
    assert (right.reward, right.says, right.components) == (1.0, "", {"first_try": 1.0, "second_try": 0.0})
    wrong = await tries.step(episode("8", score=0.5))
    assert (wrong.reward, wrong.says) == (0.0, "Again: 3+4=")
    mended = await tries.step(episode("8", "7", score=1.0))
    assert (mended.reward, mended.says, mended.components) == (0.25, "", {"first_try": 0.0, "second_try": 1.0})
    cut_off = await tries.step(episode("8", score=0.5, finish_reason="length", room=0))
    assert (cut_off.reward, cut_off.says) == (0.5, ""), "nothing follows it, so it keeps its score"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"kind": "second_tri"}, r"environment\.kind: there is no .second_tri.; did you mean 'second_try'\? Known: "),
        ({"options": {"hint": "x"}}, r"environment\.options\.hint: no such option\. Known: none\."),
        ({"kind": "second_try", "options": {"hnt": "x"}}, r"options\.hnt: no such option; did you mean 'hint'\?"),
        ({"kind": "second_try", "options": {"discount": 2}}, r"environment\.options: Expected `float` <= 1"),
        ({"kind": "second_try", "options": {"hint": 5}}, r"environment\.options: Expected `str`"),
        ({"kind": "subprocess:Popen"}, "standard library"),
        ({"kind": "countdown:Count"}, r"did you mean countdown:Countdown\?"),
        ({"kind": "countdown:Countdown", "options": {"turn": 2}}, "unexpected keyword argument 'turn'"),
        ({"kind": "countdown:Endless"}, "max_turns is 0, which is no number of turns"),
    ],
)
async def test_what_there_is_not_is_named(roots: ImportRoots, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await open_environment(msgspec.convert(config, EnvironmentConfig), roots)


async def test_numbers_of_numpy_are_numbers_and_a_measure_that_is_not_finite_is_left_out(
    roots: ImportRoots, caplog: pytest.LogCaptureFixture
) -> None:
    environment = await open_environment(EnvironmentConfig(kind="countdown:Measured"), roots)
    step = await environment.step(episode("7"))
    await environment.close()
    assert (step.reward, step.components) == (0.5, {"ok": 1.0, "half": 0.5, "left_out": 2.0})
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "environment countdown:Measured" in told
    assert "judge, far" in told


@pytest.mark.parametrize("name", ["Talks", "TalksLater"])
async def test_what_is_too_long_is_not_said_and_counted(
    name: str, roots: ImportRoots, caplog: pytest.LogCaptureFixture
) -> None:
    environment = await open_environment(EnvironmentConfig(kind=f"countdown:{name}", max_says=20), roots)
    steps = [await environment.step(episode(answer)) for answer in ("fits", "long", "ids")]
    await environment.close()
    assert [(step.reward, step.says) for step in steps] == [(0.0, "x" * 20), (1.0, ""), (1.0, "")]
    assert [step.components.get("says_too_long") for step in steps] == [None, 1.0, 1.0]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"environment countdown:{name} says 50000000" in told


async def test_ones_own_that_fails_costs_its_sample_and_then_the_worker(roots: ImportRoots) -> None:
    config = EnvironmentConfig(kind="countdown:Fails", deadline_s=2.0)
    fails = await open_environment(config, roots)
    try:
        for answer, told in (("exit", "ended its process"), ("nan", "no finite number")):
            with pytest.raises(UnscoredError, match=f"environment countdown:Fails failed twice .*{told}"):
                await fails.step(episode(answer))
        with pytest.raises(RewardError, match=r"(?s)ran past its deadline.*3 samples in a row.*Return a Step"):
            await fails.step(episode("hang"))
    finally:
        await fails.close()

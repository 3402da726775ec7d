"""Scorers on a real server may be killed, leave and be missing, and every sample gets its score once."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headway.broker.client.broker import Broker, Outages
from headway.broker.client.supervision import LearnerInfo
from headway.broker.config import BrokerConfig
from headway.broker.errors import LASTING_EXIT, ConfigError
from headway.broker.schema.status import PoolInfo, RunStatus
from headway.deploy.observe.bottleneck import read_status
from headway.deploy.observe.status_tables import pool_of, status_json, status_tables
from headway.deploy.recipe.pools import impossible_scorers
from headway.deploy.recipe.recipe import Recipe, RunConfig
from headway.deploy.recipe.resolve import recipe_to_bytes
from headway.deploy.roles.learner import rules_of
from headway.deploy.roles.scorer import score
from headway.deploy.roles.worker import work
from headway.deploy.terminal import Terminal
from headway.learner.algorithm_config import AlgorithmConfig, DistillationConfig
from headway.learner.config import ModelConfig
from headway.learner.models.model_files import model_files
from headway.rollout_workers.config import (
    RewardConfig,
    SamplingConfig,
    ScorerEngineConfig,
    ScorersConfig,
    TeacherConfig,
    WorkersConfig,
)
from headway.rollout_workers.scorers import UnfitModelError
from headway.rollout_workers.scorers.scorer_client import ScorerClient
from tests.broker.scenario import FRESH
from tests.rollout_workers.marks import VLLM
from tests.rollout_workers.reward_models import TOKENS, save_model, score_of

from .runs import run_status

LEASE_TTL_S = 2.0
NAME = "reward_model"


@pytest.mark.parametrize(("top_k", "is_refused"), [(511, False), (512, True)])
def test_a_teachers_answer_fits_into_the_server(top_k: int, *, is_refused: bool) -> None:
    recipe = Recipe(
        run=RunConfig(name="r"),
        teacher=TeacherConfig(path="hub/teacher"),
        sampling=SamplingConfig(max_new_tokens=2048),
        algorithm=AlgorithmConfig(distillation=DistillationConfig(coefficient=1.0, place="loss", top_k=top_k)),
    )
    found = list(impossible_scorers(recipe))
    assert bool(found) == is_refused
    assert not is_refused or "answer could take 8,396,800 bytes" in found[0]
    assert not is_refused or "set top_k to at most 511" in found[0]


@pytest.mark.parametrize(
    ("kind", "temperature", "is_refused"), [("vllm", 1.0, False), ("vllm", 0.7, True), ("transformers", 0.7, False)]
)
def test_an_engine_that_knows_one_temperature_teaches_at_that_alone(
    kind: str, temperature: float, *, is_refused: bool
) -> None:
    recipe = Recipe(
        run=RunConfig(name="r"),
        teacher=TeacherConfig(path="hub/teacher"),
        sampling=SamplingConfig(temperature=temperature),
        scorers=ScorersConfig(engine=ScorerEngineConfig(kind=kind)),
    )
    told = f"scorers.engine.kind={kind} gives a teacher's logprobs at temperature 1 alone, and sampling.temperature is"
    assert [one.startswith(told) for one in impossible_scorers(recipe)] == [True] * is_refused


async def begin(
    broker: Broker, directory: Path, *rewards: Path, teacher: str = "", engine: str = "transformers"
) -> None:
    """Claim a run with reward models in these directories; the policy's tokenizer is in `directory`."""
    recipe = Recipe(
        run=RunConfig(name=broker.run),
        rewards=tuple(RewardConfig(kind="reward_model", path=str(path)) for path in rewards),
        teacher=TeacherConfig(path=teacher),
        scorers=ScorersConfig(batch_tokens=64, engine=ScorerEngineConfig(kind=engine)),
        workers=WorkersConfig(heartbeat_s=0.1),
        broker=BrokerConfig(lease_ttl_s=LEASE_TTL_S),
    )
    claim = await broker.batches.claim(
        checkpoint=FRESH, rules=rules_of(recipe), config=recipe_to_bytes(recipe), resume=False
    )
    save_model(directory / "policy", scores=False)
    policy = ModelConfig(path=str(directory / "policy"))
    await broker.versions.put_model(claim.owner, model_files(policy))
    await broker.status.set_state(claim.owner, "training")
    await broker.heartbeat.begin(LearnerInfo(host="node", pid=7, user="ali", since=0.0))


@asynccontextmanager
async def process(broker: Broker, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a scorer's process, and kill it at the end if it still runs."""
    environment = {**os.environ, "HEADWAY_BROKER": broker.url, "HEADWAY_RUN": broker.run}
    argv = [sys.executable, "-m", "headway", "scorer", "--name", name]
    started = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def until(broker: Broker, claim: Callable[[RunStatus], bool]) -> RunStatus:
    """Wait until this holds of the run, and return its status."""
    async with asyncio.timeout(180):
        while not claim(status := await broker.status.snapshot()):  # noqa: ASYNC110 - it announces nothing
            await asyncio.sleep(0.01)
    return status


def shown(status: RunStatus) -> str:
    file = io.StringIO()
    Terminal(file=file, width=200).print(status_tables(status))
    return file.getvalue()


@pytest.mark.slow
async def test_every_sample_is_scored_once_while_scorers_are_missing_killed_and_told_to_leave(
    broker: Broker, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "rm", scores=True)
    await begin(broker, tmp_path, tmp_path / "rm")
    asked = ScorerClient(broker.scoring, Outages(broker.url), NAME, hold_s=30)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, TOKENS, 2 + n % 40).tolist() for n in range(80)]
    waiting = [asyncio.ensure_future(asked.score(each[:1], each[1:])) for each in tokens[:10]]
    await until(broker, lambda status: sum(queue.waiting for queue in status.scoring) == 10)
    _, why = await read_status(broker)
    assert why is not None
    assert (why.who, why.why) == ("workers", "no scorers")
    assert why.text.startswith("The workers wait for scores: 10 samples, the oldest for")
    assert "of which no process is alive (start some with `headway scorers --scorer reward_model`)" in why.text
    async with process(broker, "first") as first, process(broker, "second") as second:
        status = await until(broker, lambda status: [info.state for info in status.scorers] == ["ready", "ready"])
        assert status_json(status)["scorers"][0]["scorer"] == NAME
        assert "Scorers (2)" in shown(status)
        await asyncio.gather(*waiting)
        os.kill(second.pid, signal.SIGSTOP)
        waiting += [asyncio.ensure_future(asked.score(each[:1], each[1:])) for each in tokens[10:]]
        await until(broker, lambda status: status.scoring[0].leased > 0)
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGCONT)
        async with asyncio.timeout(180):
            found = np.concatenate(await asyncio.gather(*waiting))
        np.testing.assert_allclose(found, [score_of(model, each) for each in tokens], rtol=1e-4, atol=1e-5)
        status = await until(broker, lambda status: status.scoring[0].bytes == 0)
        assert (status.scoring[0].answered, status.scoring[0].failed) == (80, 0)
        assert status.scoring[0].expired_leases > 0, "it held leases when it was killed"
        second.terminate()
        assert await second.wait() == 0
        assert not [info for info in (await broker.status.snapshot()).scorers if "second" in info.process]
    await asked.close()


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=VLLM)])
async def test_a_scorer_on_another_engine_answers_and_leaves_when_it_is_told(
    broker: Broker, tmp_path: Path, engine: str
) -> None:
    model = save_model(tmp_path / "rm", scores=True)
    await begin(broker, tmp_path, tmp_path / "rm", engine=engine)
    asked = ScorerClient(broker.scoring, Outages(broker.url), NAME, hold_s=30)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, TOKENS, 2 + n).tolist() for n in range(40)]
    async with process(broker, "first") as first, asyncio.timeout(180):
        found = np.concatenate(await asyncio.gather(*(asked.score(each[:1], each[1:]) for each in tokens)))
        np.testing.assert_allclose(found, [score_of(model, each) for each in tokens], rtol=1e-4, atol=1e-5)
        first.terminate()
        assert await first.wait() == 0
    assert not (await broker.status.snapshot()).scorers
    await asked.close()


@pytest.mark.parametrize(
    ("path", "error", "told"),
    [
        ("missing", UnfitModelError, r"rewards\[0\].path: there is no directory .*missing"),
        ("other", UnfitModelError, r"rewards\[0\].path: .*other has another tokenizer than the policy"),
        ("policy", UnfitModelError, r"rewards\[0\].path: .*policy has no weights score.weight"),
    ],
)
def test_a_model_that_cannot_score_ends_its_scorer_for_good_with_its_key(
    url: str, run_name: str, tmp_path: Path, path: str, error: type[Exception], told: str
) -> None:
    if path == "other":
        save_model(tmp_path / path, scores=True, alphabet="9876543210+-*=,#^")

    async def claim() -> None:
        broker = Broker(url, run_name)
        await begin(broker, tmp_path, tmp_path / path)
        await broker.close()

    asyncio.run(claim())
    with pytest.raises(error, match=told) as caught:
        score(url, run_name, "p", "", ())
    assert getattr(caught.value, "exit_code", 0) == LASTING_EXIT


def test_of_several_scorers_one_is_to_be_named(url: str, run_name: str, tmp_path: Path) -> None:
    async def claim() -> None:
        broker = Broker(url, run_name)
        await begin(broker, tmp_path, tmp_path / "a", tmp_path / "b", teacher="/t")
        await broker.close()

    asyncio.run(claim())
    with pytest.raises(ConfigError, match=r"--scorer NAME\. The run has reward_model, reward_model_2, teacher"):
        score(url, run_name, "p", "", ())
    with pytest.raises(ConfigError, match="no scorer 'judge'; it has reward_model, reward_model_2, teacher") as caught:
        score(url, run_name, "p", "judge", ())
    assert caught.value.exit_code == LASTING_EXIT


def test_a_worker_with_a_wrong_setting_is_not_started_again(url: str, run_name: str, tmp_path: Path) -> None:
    async def claim() -> None:
        broker = Broker(url, run_name)
        await begin(broker, tmp_path, tmp_path / "a")
        await broker.close()

    asyncio.run(claim())
    with pytest.raises(ConfigError, match=r"engine\.options\.x: engine\.kind=embedded has no such option") as caught:
        work(url, run_name, "w-0", ("engine.options.x=1",))
    assert caught.value.exit_code == LASTING_EXIT


def test_scaling_means_the_workers_where_no_pool_is_named() -> None:
    pools = tuple(PoolInfo(pool=name, host="h", pid=1, running=1) for name in ("workers", "scorer-reward_model"))
    status = replace(run_status(), pools=pools)
    assert pool_of(status, "").pool == "workers"
    assert pool_of(status, "scorer-reward_model").pool == "scorer-reward_model"

"""A worker evaluates beside training: with one version alone, and with the in-process evaluation's results."""

import asyncio
from pathlib import Path

import pytest

from headway.broker.client.broker import Broker
from headway.broker.client.evaluations import EvaluationProgress
from headway.broker.schema import Prompt, WeightVersion
from headway.rollout_workers.config import EvalConfig, SamplingConfig
from headway.rollout_workers.environments import SingleTurn
from headway.rollout_workers.evaluation import EvalResult, evaluate, evaluation_sampling, summarize
from headway.rollout_workers.rewards.base import Score, UnscoredError
from headway.rollout_workers.samples.episode import Episodes

from .loop import LONG, LONGER, Deliveries, Learner, decoding, make_engine, make_worker, running, until
from .models import named_tensors

SIZE, SAMPLES = 6, 2
HELD_OUT = [
    Prompt(group=f"held-out-{i}", token_ids=[3 + i, 9], text="", ground_truth="", data_source="", num_samples=1)
    for i in range(SIZE)
]
GREEDY = EvalConfig(where="workers", samples=1, temperature=0.0, pass_reward=0.9)
DRAWN = EvalConfig(where="workers", samples=SAMPLES, pass_reward=0.5)


class ParityReward:
    """A reward that is the mean parity of the response's tokens."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
        tokens = [int(token) for token in response.split()]
        return Score(total=sum(token % 2 for token in tokens) / len(tokens))

    async def close(self) -> None:
        """There is nothing to free."""


@pytest.fixture
async def learner(brokers: tuple[Broker, Broker]) -> Learner:
    return await Learner.start(brokers[0], groups=40)


async def look(learner: Learner, version: WeightVersion) -> EvaluationProgress:
    progress = await learner.broker.evaluations.progress(learner.owner, version)
    assert progress is not None
    return progress


async def done(learner: Learner, version: WeightVersion) -> EvaluationProgress:
    async with asyncio.timeout(240):
        while (progress := await look(learner, version)).done < progress.samples:  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)
    return progress


async def measured_alone(directory: Path, learner: Learner, version: WeightVersion, config: EvalConfig) -> EvalResult:
    """Return the in-process evaluation of the same weights."""
    engine = make_engine(directory)
    await engine.swap_weights(version, named_tensors(learner.models[version]))
    sampling = evaluation_sampling(SamplingConfig(max_new_tokens=16), config)
    result = await evaluate(
        engine,
        HELD_OUT,
        Episodes(SingleTurn(), ParityReward(), decoding(())),
        decoding(()),
        sampling,
        config.pass_reward,
        samples=config.samples,
    )
    await engine.close()
    return result


@pytest.mark.parametrize("config", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_it_measures_what_an_evaluation_in_process_does(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path, config: EvalConfig
) -> None:
    deliveries, version = Deliveries(), learner.version(0)
    worker = make_worker(
        brokers[1], make_engine(tmp_path / "worker"), deliveries, reward=ParityReward(), evaluation=config
    )
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT, config.samples)
    await learner.publish(0, deliveries)
    async with running(worker):
        found = summarize((await done(learner, version)).results, config.samples)
        assert worker.info().submitted <= 40 * 2  # samples of training alone
        await learner.take(0)
    assert found == await measured_alone(tmp_path / "alone", learner, version, config)
    assert (found.prompts, found.samples) == (SIZE, config.samples)
    assert 0 < found.pass_rate < 1
    assert found.pass_at_k >= found.pass_rate


async def test_its_version_stays_until_the_evaluation_is_over(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path
) -> None:
    deliveries, first, second = Deliveries(), learner.version(0), learner.version(1)
    worker = make_worker(
        brokers[1], make_engine(tmp_path), deliveries, reward=ParityReward(), evaluation=DRAWN, max_new_tokens=LONG
    )
    await learner.broker.evaluations.ask(learner.owner, first, HELD_OUT, SAMPLES)
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: worker.info().generated_tokens > 0)
        await learner.publish(1, deliveries)
        await learner.publish(2, deliveries)
        progress = await look(learner, first)
        assert progress.done < progress.samples
        assert worker.info().version == first
        progress = await done(learner, first)
        await until(lambda: worker.info().version == learner.version(2))
    assert progress.mixed == 0
    assert worker.info().swaps == 2
    assert await learner.broker.evaluations.progress(learner.owner, second) is None


async def test_training_goes_on_beside_it(brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path) -> None:
    """The engine has four places, and the evaluation as many samples, which never end meanwhile."""
    release = asyncio.Event()

    class HeldReward(ParityReward):
        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            if prompt.group == HELD_OUT[0].group:
                await release.wait()
            return await super().score(prompt, response, finish_reason)

    deliveries, version = Deliveries(), learner.version(0)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=HeldReward(), evaluation=GREEDY)
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT, 1)
    await learner.publish(0, deliveries)
    async with running(worker):
        for step in range(3):
            await learner.take(step)
            await learner.publish(step + 1, deliveries)
        assert (await look(learner, version)).done == SIZE - 1
        assert worker.info().version == version
        release.set()
        assert (await done(learner, version)).done == SIZE
        await until(lambda: worker.info().version == learner.version(3))
        await learner.take(3)


async def test_an_evaluation_that_takes_too_long_is_given_up(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path
) -> None:
    deliveries, version = Deliveries(), learner.version(0)
    config = EvalConfig(where="workers", hold_s=0.2)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, evaluation=config, max_new_tokens=LONGER)
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT * 20, 1)
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: worker.info().generated_tokens > 0)
        await learner.publish(1, deliveries)
        await until(lambda: worker.info().version == learner.version(1))
        progress = await look(learner, version)
        assert progress.done < progress.samples
        free = await learner.broker.evaluations.lease("other", version, 1000, 1000)
        assert len(free.leases) == progress.samples - progress.done  # the worker handed all of them back
        await until(lambda: worker.info().submitted > 0)


async def test_a_drained_worker_hands_its_samples_to_another(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path
) -> None:
    version = learner.version(0)
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT, SAMPLES)
    mine, others = Deliveries(), Deliveries()
    leaver = make_worker(
        brokers[1], make_engine(tmp_path / "1"), mine, reward=ParityReward(), evaluation=DRAWN, max_new_tokens=LONG
    )
    stayer = make_worker(
        brokers[0],
        make_engine(tmp_path / "2"),
        others,
        reward=ParityReward(),
        evaluation=DRAWN,
        name="worker-2",
        max_new_tokens=LONG,
    )
    await learner.publish(0, mine, others)
    async with running(leaver) as leaving, running(stayer):
        await until(lambda: min(leaver.info().generated_tokens, stayer.info().generated_tokens) > 0)
        await learner.publish(1, others)
        leaver.request_drain()
        assert await leaving == "drained"
        assert (await done(learner, version)).mixed == 0
        await until(lambda: stayer.info().version == learner.version(1))


async def test_a_sample_that_cannot_be_scored_has_not_passed(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path
) -> None:
    class OftenReward(ParityReward):
        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            if prompt.group == HELD_OUT[2].group:
                raise UnscoredError("told to fail")
            return Score(total=1.0)

    deliveries, version = Deliveries(), learner.version(0)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=OftenReward(), evaluation=GREEDY)
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT, 1)
    await learner.publish(0, deliveries)
    async with running(worker):
        results = (await done(learner, version)).results
    assert [result.passed for result in results] == [n != 2 for n in range(SIZE)]


async def test_a_worker_of_a_run_that_evaluates_elsewhere_asks_for_nothing(
    brokers: tuple[Broker, Broker], learner: Learner, tmp_path: Path
) -> None:
    deliveries, version = Deliveries(), learner.version(0)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    await learner.broker.evaluations.ask(learner.owner, version, HELD_OUT, 1)
    await learner.publish(0, deliveries)
    async with running(worker):
        await learner.take(0)
        await learner.publish(1, deliveries)
        await until(lambda: worker.info().version == learner.version(1))
    assert (await look(learner, version)).done == 0

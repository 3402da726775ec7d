# mypy: disable-error-code="arg-type, attr-defined"
"""Pass rates measured with the real embedded engine on a small random model."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headway.broker.client.evaluations import EvaluationResult
from headway.broker.schema import Prompt, WeightVersion
from headway.rollout_workers.config import EngineConfig, EvalConfig, SamplingConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Chunk, Engine, GenerationRequest
from headway.rollout_workers.environments import SingleTurn
from headway.rollout_workers.evaluation import EvalResult, evaluate, evaluation_sampling, summarize
from headway.rollout_workers.rewards.base import RewardError, Score
from headway.rollout_workers.samples.episode import Episodes

from .models import STOP, make_model, named_tensors, save_config

CAPACITY = 3
SAMPLING = SamplingConfig(max_new_tokens=12)
PROMPTS = [
    Prompt(group=f"held-out-{i}", token_ids=[2 + i, 9], text="", ground_truth="", data_source="", num_samples=1)
    for i in range(10)
]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


class LengthReward:
    """A reward of a tenth for each token; it fails on the response that the test names."""

    def __init__(self, failing_call: int = -1) -> None:
        self.responses: list[str] = []
        self.finish_reasons: list[str] = []
        self._failing_call = failing_call

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
        if len(self.responses) == self._failing_call:
            raise RewardError("told to fail")
        self.responses.append(response)
        self.finish_reasons.append(finish_reason)
        return Score(total=len(response.split()) / 10)

    async def close(self) -> None:
        """There is nothing to free."""


class CountingEngine:
    """A real engine that counts the requests which it has at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.capacity = engine.capacity
        self.max_model_len = engine.max_model_len
        self.running = 0
        self.most = 0
        self.close = engine.close

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.running += 1
        self.most = max(self.most, self.running)
        stream = self._engine.generate(request)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()
            self.running -= 1


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[CountingEngine]:
    model = make_model("dense", 0)
    config = EngineConfig(max_concurrent=CAPACITY, max_model_len=32)
    real = open_engine(config, save_config(model, tmp_path / "model"), seed=0)
    await real.swap_weights(WeightVersion(1, 0), named_tensors(model))
    yield CountingEngine(real)
    await real.close()


async def run(engine: CountingEngine, reward: LengthReward, pass_reward: float = 1.0) -> EvalResult:
    decoding = Decoding(decode, (STOP,))
    player = Episodes(SingleTurn(), reward, decoding)
    return await evaluate(engine, PROMPTS, player, decoding, SAMPLING, pass_reward)


async def test_means_are_those_of_what_was_sampled(engine: CountingEngine) -> None:
    reward = LengthReward()
    result = await run(engine, reward, pass_reward=0.9)
    rewards = [len(response.split()) / 10 for response in reward.responses]
    assert result.prompts == len(rewards) == len(PROMPTS)
    assert result.reward_mean == pytest.approx(sum(rewards) / len(rewards))
    assert result.pass_rate == sum(reward >= 0.9 for reward in rewards) / len(rewards)
    # The stop token counts as a token of the response, but is not in its text.
    stops = reward.finish_reasons.count("stop")
    assert result.response_tokens_mean == pytest.approx((10 * sum(rewards) + stops) / len(rewards))
    assert all(str(STOP) not in response.split() for response in reward.responses)


async def test_the_same_weights_give_the_same_result(engine: CountingEngine) -> None:
    first, second = LengthReward(), LengthReward()
    assert await run(engine, first) == await run(engine, second)
    assert sorted(first.responses) == sorted(second.responses)


async def test_the_engine_is_kept_full_and_never_overfull(engine: CountingEngine) -> None:
    await run(engine, LengthReward())
    assert engine.most == CAPACITY


async def test_a_failing_reward_ends_it_and_leaves_no_request_behind(engine: CountingEngine) -> None:
    with pytest.raises(RewardError, match="told to fail"):
        await run(engine, LengthReward(failing_call=2))
    assert engine.running == 0
    assert (await run(engine, LengthReward())).prompts == len(PROMPTS)


async def test_no_prompts_give_zeros(engine: CountingEngine) -> None:
    decoding = Decoding(decode, (STOP,))
    player = Episodes(SingleTurn(), LengthReward(), decoding)
    empty = await evaluate(engine, [], player, decoding, SAMPLING, 1.0)
    assert empty == EvalResult(pass_rate=0.0, reward_mean=0.0, response_tokens_mean=0.0, prompts=0)


def test_pass_at_k_asks_for_one_sample_of_a_prompt_and_pass_at_1_is_the_mean() -> None:
    passed = [True, False, False, False, True, True]
    results = [EvaluationResult(one, float(one), tokens) for tokens, one in enumerate(passed)]
    assert summarize(results, samples=2) == EvalResult(
        pass_rate=0.5, reward_mean=0.5, response_tokens_mean=2.5, prompts=3, samples=2, pass_at_k=2 / 3
    )


def test_measures_are_means_over_the_samples_that_have_them() -> None:
    components = [{"exact": 1.0, "environment/turns": 2.0}, {"exact": 0.0}, {"exact": 0.5, "exact/judge": 0.25}]
    results = [EvaluationResult(False, 0.0, 1, one) for one in components]
    assert summarize(results, samples=1).reward == {"environment/turns": 2.0, "exact": 0.5, "exact/judge": 0.25}


async def test_samples_of_one_prompt_differ_unless_they_are_greedy(engine: CountingEngine) -> None:
    for temperature, differ in ((1.0, True), (0.0, False)):
        reward = LengthReward()
        sampling = evaluation_sampling(SAMPLING, EvalConfig(temperature=temperature))
        decoding = Decoding(decode, (STOP,))
        player = Episodes(SingleTurn(), reward, decoding)
        result = await evaluate(engine, PROMPTS[:1], player, decoding, sampling, 1.0, samples=8)
        assert (result.prompts, result.samples) == (1, 8)
        assert (len(set(reward.responses)) > 1) == differ

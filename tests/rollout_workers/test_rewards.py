"""Built-in rewards, adapters for users' functions, weighted sums, and every error that they explain."""

import asyncio
import gc
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import psutil
import pytest
import reasoning_gym

from headway.broker.client.scoring import Scores
from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.pool import MOST_OUTPUT_BYTES, Host, HostProcess
from headway.broker.wire.codec import decode, encode
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards import open_reward
from headway.rollout_workers.rewards.base import Reward, RewardError, Score, UnscoredError
from headway.rollout_workers.rewards.built_in import ArithmeticReward
from headway.rollout_workers.rewards.math_verify_reward import MathVerifyReward
from headway.rollout_workers.rewards.reasoning_gym_reward import ReasoningGymReward
from headway.rollout_workers.scorers import ScoringError

OWN = "tests.rollout_workers.custom_rewards"
PLENTY_S = 120.0


def prompt(ground_truth: Any = "7", **extra_info: Any) -> Prompt:
    return Prompt(
        group="0000-00000042",
        token_ids=[1],
        text="^3+4=",
        ground_truth=ground_truth,
        data_source="sums",
        extra_info=extra_info,
        num_samples=1,
    )


RewardT = TypeVar("RewardT", bound=Reward)


@asynccontextmanager
async def opened(*configs: RewardConfig | str) -> AsyncIterator[Reward]:
    reward = await open_reward([RewardConfig(kind=c) if isinstance(c, str) else c for c in configs])
    async with closed_at_the_end(reward):
        yield reward


@asynccontextmanager
async def closed_at_the_end(reward: RewardT) -> AsyncIterator[RewardT]:
    try:
        yield reward
    finally:
        await reward.close()


async def score(kind: RewardConfig | str, response: str, task: Prompt, finish_reason: str = "stop") -> Score:
    async with opened(kind) as reward:
        return await reward.score(task, response, finish_reason, [5, 6])


@pytest.mark.parametrize(
    ("response", "finish_reason", "total"),
    [
        ("3+4=7#7", "stop", 1.0),
        ("#7", "stop", 1.0),
        ("#8#7", "stop", 1.0),
        ("3+4=7#7", "length", 0.0),
        ("#7 ", "stop", 0.0),
        ("7", "stop", 0.0),
        ("#77", "stop", 0.0),
        ("#7#", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
async def test_arithmetic_wants_the_exact_answer_and_an_end(response: str, finish_reason: str, total: float) -> None:
    scored = await score("arithmetic", response, prompt(), finish_reason)
    assert (scored.total, scored.components) == (total, {"arithmetic": total})


@pytest.mark.parametrize(
    ("ground_truth", "response", "total"),
    [
        ("1/2", r"so \boxed{0.5}", 1.0),
        ("7", r"\boxed{3}, no: \boxed{7}", 1.0),
        ("7", r"\boxed{7}, no: \boxed{3}", 0.0),
        ("7", "the answer is 7", 0.0),
        ("7", r"\boxed{", 0.0),
        ("x=3", r"\boxed{3}", 1.0),
        ("5", r"\boxed{5}. So the final answer is $7$.", 1.0),
        ("7", r"\boxed{5}. So the final answer is $7$.", 0.0),
        ("7", r"\boxed{7}. Therefore, the answer is 5. I hope it is correct.", 1.0),
        ("7", r"\boxed{} final answer is $7$", 0.0),
        ("7", r"\boxed{7}, no: \boxed{}", 0.0),
        ("7", r"final answer is $7$, \boxed{8} ... $$7$$ 7", 0.0),
        ("7", r"\boxed {7} $3$", 1.0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}} and $3$", 1.0),
        (r"\boxed{7} final answer is $5$", r"\boxed{7}", 1.0),
        (r"\$18", r"\boxed{18}", 1.0),
        (7, r"\boxed{7}", 1.0),
        (1e-7, r"\boxed{1 \times 10^{-7}}", 1.0),
        (1e-7, r"\boxed{0.0000002}", 0.0),
        ("2.5e-3", r"\boxed{0.0025}", 1.0),
        ("1", r"\boxed{1 1/2}", 0.0),
        ("3/2", r"\boxed{1 1/2}", 1.0),
        ("0", r"\boxed{1 000}", 0.0),
        ("1000", r"\boxed{1\,000}", 1.0),
        ("1_000", r"\boxed{1}", 0.0),
        ("1, 2", r"\boxed{1,2}", 1.0),
        ("3", r"\boxed{3.}", 1.0),
        ("2018", r"\boxed{2024-01-05}", 0.0),
        ("10", r"\boxed{10 pm}", 0.0),
        ("3 dollars", r"\boxed{3}", 1.0),
        ("25 percent", r"\boxed{0.25}", 1.0),
        ("listen", r"\boxed{silent}", 0.0),
        (r"\text{no solution}", r"\boxed{No solution.}", 1.0),
        ("True", r"\boxed{False}", 0.0),
        ("sqrt(2)", r"\boxed{\sqrt{2}}", 1.0),
        ("5", r"so $\boxed 5$.", 1.0),
        ("5", r"\boxed{5}, in the \boxed form", 1.0),
        (r"As $x=1$, it is $\boxed 2$.", r"\boxed{1}", 0.0),
    ],
)
async def test_math_verify_compares_boxed_answers(
    verifier: Reward, ground_truth: Any, response: str, total: float
) -> None:
    assert (await verifier.score(prompt(ground_truth), response, "stop")).total == total


async def test_truths_that_a_built_in_reward_cannot_read_are_known_before_a_response_is_there() -> None:
    unreadable = ["", r"\boxed{}", ["7", "8"], True, {"answer": 7}, r"\boxed{7"]
    unreadable += [math.nan, -math.inf, "100 200", "2024-01-05", "10:30 pm", "5 feet 3 inches", "x²", "€5", "90°", "-"]
    readable = [
        "7",
        r"\frac{1}{2}",
        4,
        -0.5,
        r"\$18",
        "(1, 2)",
        "1, 2",
        "1e-7",
        "1 1/2",
        "Monday",
        "A",
        "3:4",
        "5 or 6",
    ]
    async with closed_at_the_end(MathVerifyReward(deadline_s=PLENTY_S)) as verifier:
        told = await verifier.complaints([prompt(one) for one in (*unreadable, *readable)])
    assert [bool(complaint) for complaint in told] == [True] * len(unreadable) + [False] * len(readable)
    told = await ArithmeticReward().complaints([prompt(one) for one in ("7", 7, [7], 7.5, None)])
    assert [bool(complaint) for complaint in told] == [False, False, True, True, True]
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    rows = [
        {"task": "chain_sum", "entry": entry},
        {},
        {"task": "chain_sun", "entry": entry},
        {"task": "chain_sum", "entry": {}},
    ]
    async with closed_at_the_end(ReasoningGymReward(deadline_s=PLENTY_S)) as verifier:
        told = await verifier.complaints([prompt(**row) for row in rows])
    assert [bool(complaint) for complaint in told] == [False, True, True, True]


@pytest.fixture
async def verifier() -> AsyncIterator[Reward]:
    async with opened("math_verify") as reward:
        yield reward


async def test_math_verify_survives_an_answer_that_never_ends() -> None:
    reward = MathVerifyReward(deadline_s=3)
    try:
        await reward.score(prompt(), r"\boxed{7}", "stop")
        endless = await reward.score(prompt(), r"\boxed{9^{9^{9^{9}}}-9^{9^{9^{9}}}+7}", "stop")
        after = await reward.score(prompt(), r"\boxed{7}", "stop")
    finally:
        await reward.close()
    assert (endless.total, endless.components) == (0.0, {"timed_out": 1.0})
    assert after.total == 1.0


async def test_a_comparison_that_ends_its_process_is_worth_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends as one does that the system kills for its memory."""
    reward = MathVerifyReward(deadline_s=30)
    try:
        assert (await reward.score(prompt(), r"\boxed{7}", "stop")).total == 1.0
        started = Host.start

        async def start_and_kill(host: Host) -> HostProcess:
            process = await started(host)
            asyncio.get_running_loop().call_later(1, os.kill, process._process.pid, signal.SIGKILL)
            return process

        monkeypatch.setattr(Host, "start", start_and_kill)
        killed = await reward.score(prompt(), r"\boxed{9^{9^{9^{9}}}-9^{9^{9^{9}}}+7}", "stop")
        monkeypatch.undo()
        after = await reward.score(prompt(), r"\boxed{7}", "stop")
    finally:
        await reward.close()
    assert (killed.total, killed.components) == (0.0, {"timed_out": 1.0})
    assert after.total == 1.0


@pytest.mark.parametrize("kind", ["math_verify", "reasoning_gym"])
async def test_a_reward_may_start_its_process_before_it_is_asked(kind: str) -> None:
    """A worker's first samples are generated meanwhile."""
    before, complaints = _children(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    reward = await open_reward([RewardConfig(kind=kind)], warms=True)
    try:
        for _ in range(3000):
            if _children() - before:
                break
            await asyncio.sleep(0.01)
        assert _children() - before
    finally:
        await reward.close()  # while it imports
    assert _children() == before
    del reward
    gc.collect()
    assert complaints == []


async def test_rewards_beside_one_that_is_refused_leave_no_process() -> None:
    before = _children()
    with pytest.raises(ConfigError, match="there is no 'nonsense'"):
        await open_reward([RewardConfig(kind="math_verify"), RewardConfig(kind="nonsense")], warms=True)
    assert _children() == before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


async def test_math_verify_refuses_a_ground_truth_that_is_none() -> None:
    with pytest.raises(RewardError, match="no mathematical expression"):
        await score("math_verify", r"\boxed{7}", prompt(""))


async def test_reasoning_gym_scores_its_own_entries_after_the_wire() -> None:
    async with opened("reasoning_gym") as reward:
        for task in ("chain_sum", "spell_backward", "rearc", "prime_factorization"):
            entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
            work = prompt(task=task, entry=msgspec.msgpack.decode(msgspec.msgpack.encode(entry)))
            tagged = await reward.score(work, f"I think <answer>{entry['answer']}</answer>", "stop")
            plain = await reward.score(work, f" {entry['answer']}\n", "stop")
            wrong = await reward.score(work, "<answer>no such answer</answer>", "stop")
            assert tagged.total == plain.total == 1.0
            assert wrong.total < 0.5
            told = [one.components["reasoning_gym/tagged"] for one in (tagged, plain)]
            assert told == [1.0, 0.0]


async def test_reasoning_gym_explains_a_prompt_that_it_cannot_score() -> None:
    async with opened("reasoning_gym") as reward:
        for extra_info, message in (
            ({}, "prompt '0000-00000042' has no extra_info"),
            ({"task": "chain_sum"}, r"has \['task'\]"),
            ({"task": "chain_sun", "entry": {}}, "did you mean 'chain_sum'"),
            ({"task": "chain_sum", "entry": {"question": "?"}}, "cannot score even the right answer"),
        ):
            with pytest.raises(RewardError, match=message):
                await reward.score(prompt(**extra_info), "7", "stop")


async def test_a_verifier_of_reasoning_gym_that_never_ends_is_worth_0() -> None:
    """`countdown` evaluates the model's own text."""
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=1)[0]
    async with opened(RewardConfig(kind="reasoning_gym", deadline_s=2.0)) as reward:
        work = prompt(task="countdown", entry=msgspec.msgpack.decode(msgspec.msgpack.encode(entry)))
        endless = await reward.score(work, "<answer>9**9**9**9</answer>", "stop")
    assert (endless.total, endless.components["reasoning_gym/timed_out"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "total", "components"),
    [
        ("verl_float", 1.0, {}),
        ("verl_dict", 0.5, {"verl_dict/acc": 1.0, "verl_dict/length": 1.0}),
        ("verl_short", 1.0, {}),
        ("verl_async", 0.25, {}),
        ("trl_list", 1.0, {}),
        ("trl_short", 1.0, {}),
        ("trl_wrapped", 1.0, {}),
        ("trl_all", 0.5, {}),
        ("trl_passes_the_state_on", 1.0, {}),
        (
            "measured",
            0.5,
            {
                "measured/ok": 1.0,
                "measured/int": 3.0,
                "measured/zero_d": 2.0,
                "measured/decimal": 0.5,
                "measured/fraction": 0.25,
                "measured/scalar": 0.25,
                "measured/3": 4.0,
                "measured/left_out": 3.0,
            },
        ),
    ],
)
async def test_users_functions_are_called_in_their_own_signature(
    name: str, total: float, components: dict[str, float]
) -> None:
    scored = await score(f"{OWN}:{name}", "7", prompt(level=3))
    assert (scored.total, scored.components) == (total, {name: total, **components})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "KeyError: 'answer'"),
        ("returns_none", "returned None"),
        ("returns_nan", "returned nan"),
        ("returns_text", "returned '1.0'"),
        ("returns_no_score", "must have the key 'score'"),
        ("trl_none", "returned None"),
        ("trl_number", "a list of one number, not 1.0"),
        ("trl_two", "a list of one number"),
        ("trl_needs_column", "it asks for answer, and is called with "),
        ("trl_reads_state", "trainer_state.global_step is not known"),
        ("trl_defaults_the_step", "trainer_state.global_step is not known"),
        ("trl_looks_for_the_step", "trainer_state.max_steps is not known"),
        ("trl_suppresses", "trainer_state.epoch is not known"),
        ("many_measures", "returned 101 measures"),
    ],
)
async def test_a_function_that_fails_is_named_with_its_prompt(name: str, message: str) -> None:
    with pytest.raises(UnscoredError) as raised:
        await score(f"{OWN}:{name}", "7", prompt())
    for part in (message, f"{OWN}:{name}", "0000-00000042", "^3+4=", "The sample is handed back"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "truth", [["Paris, France", 0], 4, 2.5, True, {"a": [1, None]}, "4", [], -(2**60)], ids=lambda truth: repr(truth)
)
async def test_a_function_gets_the_ground_truth_and_columns_with_the_types_of_the_row(truth: Any) -> None:
    task = decode(encode(prompt(truth, wanted=truth)), Prompt)
    for name in ("verl_types", "trl_types"):
        assert (await score(f"{OWN}:{name}", "7", task)).total == 1.0


@pytest.mark.parametrize("signature", ["auto", "trl"])
async def test_a_conversations_completion_is_messages_for_trl_and_so_is_its_prompt_where_that_is_said(
    signature: Literal["auto", "trl"],
) -> None:
    messages = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "I say "}]
    task = msgspec.structs.replace(prompt(), messages=messages)
    scored = await score(RewardConfig(kind=f"{OWN}:trl_conversation", signature=signature), "7", task)
    assert scored.components == {"trl_conversation": 1.0, "trl_conversation/half": 0.5}


async def test_a_measure_that_is_not_finite_is_told_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(f"{OWN}:measured") as reward:
        for _ in range(3):
            await reward.score(prompt(level=3), "7", "stop")
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{OWN}:measured" in told
    assert "judge, far, vast" in told


async def test_a_function_runs_in_the_directory_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "key.txt").write_text("0.75")
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    roots = ImportRoots((OWN,), tmp_path)
    reward = await open_reward([RewardConfig(kind=f"{OWN}:reads_a_file")], roots)
    assert (await reward.score(prompt(), "7", "stop")).total == 0.75
    await reward.close()


async def test_a_flood_of_output_and_a_vast_error_are_cut_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async with opened(f"{OWN}:floods") as reward:
        assert (await reward.score(prompt(), "7", "stop")).total == 1.0
        with pytest.raises(UnscoredError) as raised:
            await reward.score(prompt(), "raise", "stop")
    assert len(str(raised.value)) < 2000
    printed = capfd.readouterr().err
    assert len(printed) < 2 * (MOST_OUTPUT_BYTES + 10_000)  # of the process, and of the one in which it is repeated
    told = re.findall(rf"reward {OWN}:floods: ([\d,]+) bytes of its output were left out", printed)
    assert sum(int(one.replace(",", "")) for one in told) > 140_000_000


async def test_weights_that_make_the_sum_infinite_are_told_as_such() -> None:
    rewards = [RewardConfig(kind=f"{OWN}:verl_short", weight=1e308)] * 2
    with pytest.raises(RewardError, match="lower the weights"):
        async with opened(*rewards) as reward:
            await reward.score(prompt(), "7", "stop")


async def test_a_slow_function_does_not_block_the_loop() -> None:
    async with opened(f"{OWN}:slow") as reward:
        waiting = asyncio.create_task(reward.score(prompt(), "7", "stop"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await waiting).total == 1.0


async def test_several_rewards_are_summed_by_weight_under_distinct_names() -> None:
    dictionary = RewardConfig(kind=f"{OWN}:verl_dict", weight=2.0)
    length = RewardConfig(kind=f"{OWN}:trl_short", weight=-0.1)
    async with opened("arithmetic", dictionary, length, length) as reward:
        scored = await reward.score(prompt(), "#7", "stop")
    assert scored.total == pytest.approx(1.0 + 2 * 0.5 - 0.1 * 2 - 0.1 * 2)
    assert scored.components == {
        "arithmetic": 1.0,
        "verl_dict": 0.5,
        "verl_dict/acc": 1.0,
        "verl_dict/length": 2.0,
        "trl_short": 2.0,
        "trl_short_2": 2.0,
    }


async def test_an_explicit_signature_needs_no_detection() -> None:
    with pytest.raises(RewardError, match="it asks for text, truth, and is called with"):
        await score(RewardConfig(kind=f"{OWN}:unusual", signature="verl"), "7", prompt())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("aritmetic", "did you mean 'arithmetic'"),
        ("zzz", "there is no 'zzz'. Known: arithmetic, math_verify, reasoning_gym"),
        ("no_such_package.rewards:score", "cannot import 'no_such_package.rewards'"),
        (f"{OWN}:verl_flaot", f"did you mean {OWN}:verl_float"),
        (f"{OWN}:asyncio", "is a module, and no function or class"),
        (
            f"{OWN}:unusual",
            r"unusual\(text, truth\) has neither.*verl: compute_score\(.*TRL: reward\(prompts",
        ),
    ],
)
async def test_a_reward_that_cannot_be_opened_says_what_could(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await open_reward([RewardConfig(kind=kind)])


async def test_no_reward_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none given"):
        await open_reward([])


class Judge:
    """A reward model in another process: its score is the mean of the tokens, or the reason why there is none."""

    def __init__(self, *, reason: str = "") -> None:
        self.reason = reason

    async def score(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float = 1, top_k: int = 0
    ) -> Scores:
        if self.reason:
            raise ScoringError(self.reason)
        return np.array([np.mean([*prompt_tokens, *response_tokens])], np.float32)

    async def close(self) -> None:
        """There is nothing to free."""


@pytest.mark.parametrize(("clip", "share"), [(0.0, 2.0), (0.5, 0.5)])
async def test_a_reward_models_score_is_normalized_clipped_and_weighed_beside_a_rule(clip: float, share: float) -> None:
    model = RewardConfig(kind="reward_model", path="rm", weight=0.1, mean=3.0, std=0.5, clip=clip)
    rule = RewardConfig(kind="arithmetic", weight=2.0)
    asked = []

    def opened(name: str, config: RewardConfig) -> Judge:
        asked.append((name, config.path))
        return Judge()

    reward = await open_reward([rule, model, model], open_scorer=opened)
    task = msgspec.structs.replace(prompt(), token_ids=[2, 3])
    score = await reward.score(task, "#7", "stop", [5, 6])
    assert score.components == {"arithmetic": 1.0, "reward_model": 4.0, "reward_model_2": 4.0}
    assert score.total == pytest.approx(2.0 + 2 * 0.1 * share)
    assert asked == [("reward_model", "rm"), ("reward_model_2", "rm")]
    await reward.close()


@pytest.mark.slow
async def test_a_sample_that_no_scorer_can_score_is_given_up_and_three_end_the_worker() -> None:
    model = RewardConfig(kind="reward_model", path="rm", deadline_s=0.01)
    reward = await open_reward([model], open_scorer=lambda name, config: Judge(reason="token 99 is unknown"))
    for error in (UnscoredError, UnscoredError, RewardError):
        with pytest.raises(error, match=r"reward reward_model was asked in vain on prompt .*: token 99 is unknown"):
            await reward.score(prompt(), "7", "stop", [7])
    with pytest.raises(ConfigError, match="asked by the workers of a run, and there is none here"):
        await open_reward([model])

"""Reward functions that hang, exit, end their process or raise cost their own sample, and nothing else."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

from headway.broker.errors import LASTING_EXIT, ConfigError, UserCodeError
from headway.broker.schema import Prompt
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards import open_reward
from headway.rollout_workers.rewards.base import RewardError, Score, UnscoredError

OWN = "tests.rollout_workers.custom_rewards"
HANGS_S, PLENTY_S = 1.5, 60.0

Reward = Callable[..., Awaitable[Score]]


@pytest.fixture
async def open_own() -> Any:
    """Yield a function: `open(name, deadline_s)` gives `score(response, **extra_info)` of that reward."""
    opened = []

    async def open_function(name: str, deadline_s: float = PLENTY_S, **config: Any) -> Reward:
        reward = await open_reward([RewardConfig(kind=f"{OWN}:{name}", deadline_s=deadline_s, **config)])
        opened.append(reward)

        def score(response: str, **extra_info: Any) -> Awaitable[Score]:
            return reward.score(prompt(extra_info), response, "stop")

        return score

    yield open_function
    for reward in opened:
        await reward.close()


def prompt(extra_info: dict[str, Any]) -> Prompt:
    return Prompt(
        group="0000-00000042",
        token_ids=[1],
        text="^3+4=",
        ground_truth="7",
        data_source="sums",
        extra_info=extra_info,
        num_samples=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "response", "message"),
    [
        ("hangs_in_a_coroutine", "hang", r"it ran past its deadline of 1\.5 s"),
        ("never_lets_go", "hang", r"it ran past its deadline of 1\.5 s"),
        ("exits", "exit", r"called sys\.exit\(0\)"),
        ("exits_in_a_coroutine", "exit", r"called sys\.exit\(\)"),
        ("ends_its_process", "exit", "it ended its process with exit code 0"),
    ],
)
async def test_one_that_cannot_score_a_response_scores_the_next_one(
    open_own: Any, name: str, response: str, message: str
) -> None:
    score = await open_own(name, HANGS_S if response == "hang" else PLENTY_S)
    assert (await score("7")).total == 1.0
    with pytest.raises(UnscoredError, match=f"{OWN}:{name} failed twice on prompt '0000-00000042' .*{message}"):
        await score(response)
    assert (await score("7")).total == 1.0


async def test_a_call_that_hangs_costs_those_beside_it_a_repetition(open_own: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    score = await open_own("hangs_on", HANGS_S)
    hanging = asyncio.ensure_future(score("hang", calls=str(calls)))
    beside = [score(f"{number}", calls=str(calls)) for number in range(20)]
    assert [scored.total for scored in await asyncio.gather(*beside)] == [1.0] * 20
    with pytest.raises(UnscoredError, match="ran past its deadline"):
        await hanging
    made = [line.split() for line in calls.read_text().splitlines()]
    assert [response for response, _ in made].count("hang") == 2
    for pid in {int(pid) for _, pid in made if "hang" in (response for response, p in made if p == pid)}:
        assert not psutil.pid_exists(pid)


async def test_a_function_that_never_scored_anything_ends_the_worker_after_three(open_own: Any) -> None:
    score = await open_own("raises")
    for _ in range(2):
        with pytest.raises(UnscoredError):
            await score("7")
    with pytest.raises(
        RewardError, match=f"{OWN}:raises .*KeyError.* on 3 samples in a row: the worker ends"
    ) as raised:
        await score("7")
    assert not isinstance(raised.value, UnscoredError)
    assert raised.value.exit_code == LASTING_EXIT


async def test_one_that_has_worked_has_as_long_as_a_call_may_take(
    open_own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = 0.0
    monkeypatch.setattr("headway.rollout_workers.rewards.base.time", SimpleNamespace(monotonic=lambda: clock_s))
    score = await open_own("exits", deadline_s=20.0)
    await score("7")
    for _ in range(3):
        with pytest.raises(UnscoredError):
            await score("exit")
    clock_s = 20.1
    with pytest.raises(RewardError, match="on 4 samples in a row"):
        await score("exit")
    await score("7")
    with pytest.raises(UnscoredError):
        await score("exit")


async def test_a_call_that_fails_once_is_made_once_more(
    open_own: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    score = await open_own("fails_once")
    with caplog.at_level(logging.WARNING):
        assert (await score("7", tried=str(tmp_path / "tried"))).total == 1.0
    assert "raised ConnectionError: the judge is away (custom_rewards.py, line" in caplog.text
    assert ", in fails_once); it is made once more" in caplog.text


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_what_it_started_ends_with_it_and_what_it_printed_is_kept(
    open_own: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    score = await open_own("starts_others", HANGS_S)
    pid = tmp_path / "pid"
    await score("7", pid=str(pid))
    with pytest.raises(UnscoredError, match="ran past its deadline"):
        await score("hang", pid=str(pid))
    async with asyncio.timeout(240):  # the process was killed, and the system may take a moment
        while is_running(int(pid.read_text())):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.02)
    said = capfd.readouterr()
    assert (said.out, said.err.count("to be seen in the log")) == ("", 3)


async def test_calls_run_in_several_processes_if_told_to_and_never_in_ours(open_own: Any) -> None:
    score = await open_own("where", processes=2)
    pids = {scored.total for scored in await asyncio.gather(*(score("7") for _ in range(8)))}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import os; os._exit(0)", UserCodeError, "opening it ended its process with exit code 0"),
        ("import sys; sys.exit(0)", ConfigError, "importing 'at_import' raised SystemExit: 0"),
        (
            "\n1 / 0",
            ConfigError,
            r"importing 'at_import' raised ZeroDivisionError: .* \(at_import.py, line 2, in <module>",
        ),
    ],
)
async def test_a_module_that_cannot_be_imported_is_told_before_any_call(
    source: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "at_import.py").write_text(source)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    with pytest.raises(error, match=message):
        await open_reward([RewardConfig(kind="at_import:score")])


def test_calls_to_a_process_that_has_just_ended_are_made_in_another_one() -> None:
    """The workers' loop closes a pipe at the first write that fails; a second write is an error there."""

    async def scored() -> tuple[int, list[Score]]:
        reward = await open_reward([RewardConfig(kind=f"{OWN}:where")])
        try:
            pid = int((await reward.score(prompt({}), "7", "stop")).total)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)  # noqa: ASYNC251 - the loop shall not hear of it
            return pid, await asyncio.gather(*(reward.score(prompt({}), "7", "stop") for _ in range(8)))
        finally:
            await reward.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pid, scores = runner.run(scored())
    assert len({score.total for score in scores} - {pid}) == 1


DIES = f"""
import asyncio, os, signal
from headway.broker.schema import Prompt
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards import open_reward

async def main():
    reward = await open_reward([RewardConfig(kind="{OWN}:hangs_on")])
    prompt = Prompt(group="g", token_ids=[1], text="", ground_truth="", data_source="", num_samples=1,
                    extra_info={{"calls": os.path.abspath("calls")}})
    hanging = asyncio.ensure_future(reward.score(prompt, "hang", "stop"))
    while not os.path.exists("calls"):
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_call_that_hangs_does_not_outlive_its_worker(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    environment["HEADWAY_IMPORT_PATH"] = os.getcwd()
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, cwd=tmp_path, env=environment)
    assert await worker.wait() == -signal.SIGKILL
    pid = int((tmp_path / "calls").read_text().split()[1])
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, 30)


async def test_no_process_is_left_over(open_own: Any) -> None:
    before = {child.pid for child in psutil.Process().children()}
    reward = await open_reward([RewardConfig(kind=f"{OWN}:where")])
    await reward.score(prompt({}), "7", "stop")
    await reward.close()
    assert {child.pid for child in psutil.Process().children()} == before

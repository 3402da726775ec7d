"""The cost of calling a user's reward function in a process that can be killed, against in the worker's own.

    python -m benchmarks.reward_calls [--calls 4000] [--characters 4000] [--processes 1]

The function does nothing, so the way to it is measured: a plain function in a thread (`in_thread`, where nothing could
end a call that hangs), and in the pool that workers use (`in_pool`), with so many calls at once. A prompt has 200
characters and a response `--characters`. The last line of standard output is one JSON object: calls a second, and of
the worker's own processor the microseconds that each call takes, which generation loses.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from headway.broker.schema import Prompt
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards import open_reward
from headway.rollout_workers.rewards.functions import FunctionCaller, FunctionInput

AT_ONCE = (1, 64)
REPETITIONS = 5

Score = Callable[[Prompt, str], Awaitable[Any]]


def trivial(solution_str: str, ground_truth: str) -> float:
    """The function that is called."""
    return float(solution_str == ground_truth)


async def measure(score: Score, prompt: Prompt, response: str, calls: int, at_once: int) -> dict[str, float]:
    """Return medians over the repetitions, after one that does not count."""
    laps = [await _lap(score, prompt, response, calls, at_once) for _ in range(1 + REPETITIONS)][1:]
    seconds, cpu = (statistics.median(lap[which] for lap in laps) for which in (0, 1))
    return {"calls_per_s": calls / seconds, "own_cpu_us_per_call": 1e6 * cpu / calls}


async def _lap(score: Score, prompt: Prompt, response: str, calls: int, at_once: int) -> tuple[float, float]:
    """Return seconds, and seconds of this process's processor."""
    left = iter(range(calls))

    async def caller() -> None:
        for _ in left:
            await score(prompt, response)

    began, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return time.perf_counter() - began, time.process_time() - busy


async def compare(calls: int, characters: int, processes: int) -> dict[str, Any]:
    """Measure both ways, one after the other for each number of calls at once."""
    prompt = Prompt(
        group="0000-00000000",
        token_ids=[1],
        text="x" * 200,
        ground_truth="7",
        data_source="benchmark",
        extra_info={"level": 3},
        num_samples=1,
    )
    own, response = FunctionCaller(trivial, "verl"), "y" * characters

    async def in_thread(prompt: Prompt, response: str) -> Any:
        asked = FunctionInput(
            prompt.text, None, response, [], prompt.ground_truth, prompt.data_source, prompt.extra_info
        )
        return await asyncio.to_thread(own.score, asked)

    pool = await open_reward([RewardConfig(kind="benchmarks.reward_calls:trivial", processes=processes)])

    async def in_pool(prompt: Prompt, response: str) -> Any:
        return await pool.score(prompt, response, "stop")

    try:
        return {
            f"{at_once}_at_once": {
                "in_thread": await measure(in_thread, prompt, response, calls, at_once),
                "in_pool": await measure(in_pool, prompt, response, calls, at_once),
            }
            for at_once in AT_ONCE
        }
    finally:
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--characters", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(uvloop.run(compare(options.calls, options.characters, options.processes))))


if __name__ == "__main__":
    main()

"""Mathematical answers in `\\boxed{...}`, compared with the ground truth by math-verify.

It runs in a process of its own: a model under training finds the expression that sympy never finishes, and
neither a thread nor an exception can stop that, while a process can be killed.
"""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import msgspec

from broker.schema import Prompt

from .base import RewardError, Score

DEADLINE_S = 10.0


class MathVerifyScorer:
    """1 if the last boxed answer equals the ground truth, else 0; also 0 if comparing them takes too long."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """`components["timed_out"]` is 1 where the comparison was given up."""
        async with self._turn:
            process = await self._started()
            try:
                return await asyncio.wait_for(_ask(process, prompt, response), self._deadline_s)
            except TimeoutError:
                await self.close()
                return Score(total=0.0, components={"timed_out": 1.0})
            except asyncio.CancelledError:
                # An answer that nobody reads would be taken for the next question's.
                await self.close()
                raise

    async def close(self) -> None:
        """Kill the process; the next score starts another."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollout_workers.rewards.math_verify_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
            await _read_line(self._process)
        return self._process


async def _ask(process: asyncio.subprocess.Process, prompt: Prompt, response: str) -> Score:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode([prompt.ground_truth, response]) + b"\n")
    await process.stdin.drain()
    answer = await _read_line(process)
    if isinstance(answer, str):
        raise RewardError(f"math_verify failed on prompt {prompt.group!r} ({prompt.text[:80]!r}): {answer}")
    return Score(total=float(answer), components={"timed_out": 0.0})


async def _read_line(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RewardError("math_verify: its process died; run `python -m rollout_workers.rewards.math_verify_process`")
    return msgspec.json.decode(line)

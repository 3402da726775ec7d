"""Your own reward functions by import path, with the signature of verl or of TRL.

verl  `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict` with "score"
TRL   `reward(prompts, completions, **kwargs) -> list[float]`; kwargs are the dataset's columns as lists:
      ground_truth, data_source and extra_info's keys, and completion_ids

They run in processes of their own (`broker.user_code`), called by `function_calls.py`, under a deadline.
"""

import ast
from collections.abc import Sequence

from headway.broker.errors import UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots, definition
from headway.broker.user_code.pool import HostPool
from headway.broker.user_code.protocol import Program
from headway.rollout_workers.config import RewardConfig

from .base import Score
from .failures import Failures, LeftOut
from .function_calls import Asked, signature_of


def check_function(config: RewardConfig, where: str) -> None:
    """Raise ConfigError, before anything runs, where the source shows that `open_function` would. `where` is the key of
    the function's path."""
    found = definition(config.kind, where)
    if isinstance(found, ast.ClassDef) or found is None or found.decorator_list or config.signature != "auto":
        return
    of = found.args
    every = (*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg)
    signature_of(config.kind, [one.arg for one in every if one is not None])


async def open_function(config: RewardConfig, roots: ImportRoots) -> "FunctionReward":
    """Open `package.module:function` as a reward, in processes of its own. Raises ConfigError if it does not exist, may
    not be imported or fits neither signature, UserCodeError if importing it hangs or ends its process."""
    roots.check(config.kind, "rewards.kind")
    program = Program(
        name=f"reward {config.kind}",
        factory="headway.rollout_workers.rewards.function_calls:open_calls",
        arguments={
            "path": config.kind,
            "signature": config.signature,
            "named": roots.named,
            "directory": str(roots.directory),
        },
        import_path=str(roots.directory),
    )
    pool = HostPool(program, processes=config.processes)
    try:
        await pool.open()
        reads_tokens = await pool.call("reads_tokens", deadline_s=config.deadline_s)
    except BaseException:
        await pool.close()
        raise
    return FunctionReward(config.kind, pool, config.deadline_s, reads_tokens=reads_tokens)


class FunctionReward:
    """Calls one function in processes that can be killed."""

    def __init__(self, path: str, pool: HostPool, deadline_s: float, *, reads_tokens: bool = False) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._reads_tokens = reads_tokens
        self._left_out = LeftOut(f"reward {path}")
        self._failures = Failures(
            f"reward {path}", "Return a number for every response, within rewards.deadline_s.", deadline_s
        )

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: Sequence[int] = ()) -> Score:
        """Score a response. `components` has the function's further measures, and as `left_out` the number of those
        that are not finite, if there are any. Raises UnscoredError if the function twice raises, returns a score that
        is no finite number, passes its deadline or ends its process; RewardError if it fails again and again."""
        asked = Asked(
            prompt.text,
            prompt.messages,
            response,
            list(tokens) if self._reads_tokens else [],
            prompt.ground_truth,
            prompt.data_source,
            prompt.extra_info,
        )
        try:
            total, parts, left_out = await self._pool.call("score", asked, deadline_s=self._deadline_s)
        except UserCodeError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        return Score(total=total, components=self._left_out.note(parts, left_out))

    async def close(self) -> None:
        """Kill its processes."""
        await self._pool.close()

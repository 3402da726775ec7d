"""Reward functions as users write them, some that work and some that fail. Processes import this: keep it light."""

import asyncio
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any


def verl_float(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    assert (data_source, extra_info) == ("sums", {"level": 3})
    return float(solution_str == ground_truth)


def verl_dict(solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    import numpy as np

    assert set(kwargs) == {"data_source", "extra_info"}
    return {"score": np.float32(0.5), "acc": True, "length": len(solution_str), "pred": solution_str}


def verl_short(solution_str: str, ground_truth: str) -> int:
    return 1


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    await asyncio.sleep(0)
    return 0.25


def trl_list(prompts: list[str], completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    assert prompts == ["^3+4="]
    assert kwargs == {"level": [3], "data_source": ["sums"], "completion_ids": [[5, 6]]}
    return [float(c == g) for c, g in zip(completions, ground_truth, strict=True)]


def verl_types(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return 1 where every value has the type of its row."""
    wanted = extra_info["wanted"]
    return float(ground_truth == wanted and type(ground_truth) is type(wanted))


def trl_types(completions: list[str], ground_truth: list[Any], wanted: list[Any]) -> list[float]:
    return [float(ground_truth == wanted and type(ground_truth[0]) is type(wanted[0]))]


def trl_conversation(completions: list[Any], completion_ids: list[Any], log_metric: Any, **kwargs: Any) -> list[float]:
    """Read a conversation as TRL's functions do."""
    assert completions == [[{"role": "assistant", "content": "I say 7"}]]
    assert completion_ids == [[5, 6]]
    assert not {"trainer_state", "log_extra", "log_metric", "extra_info"} & set(kwargs)
    for value in (1, 0.0):
        log_metric("half", value)
    return [1.0 if isinstance(kwargs["prompts"][0], str) else float(kwargs["prompts"][0][-1]["content"] == "3+4?")]


def trl_all(prompts: Any, completions: Any, trainer_state: Any, log_extra: Any, extra_info: Any) -> Any:
    import numpy as np

    log_extra("seen", completions)
    assert extra_info == [{"level": 3}]
    return np.array([0.5], np.float32)


def trl_reads_state(completions: list[str], trainer_state: Any) -> list[float]:
    return [1.0 if trainer_state.global_step else 0.0]


def trl_defaults_the_step(completions: list[str], trainer_state: Any) -> list[float]:
    return [1.0 if getattr(trainer_state, "global_step", 0) < 100 else 0.0]


def trl_looks_for_the_step(completions: list[str], trainer_state: Any) -> list[float]:
    return [1.0 if hasattr(trainer_state, "max_steps") else 0.0]


def trl_suppresses(completions: list[str], trainer_state: Any) -> list[float]:
    try:
        return [float(trainer_state.epoch)]
    except AttributeError:
        return [0.0]


def trl_passes_the_state_on(completions: list[str], trainer_state: Any) -> list[float]:
    import copy

    return [1.0 if copy.copy(trainer_state) is not None and str(trainer_state) else 0.0]


def measured(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return measures as libraries make them, some of them no finite numbers."""
    import decimal
    import fractions

    import numpy as np

    class Scalar:  # as torch's, which takes seconds to import
        ndim = 0

        def __float__(self) -> float:
            return 0.25

    odd: dict[Any, Any] = {3: 4}
    return {
        "score": np.array(0.5),
        "ok": np.bool_(True),
        "int": np.int64(3),
        "zero_d": np.array(2, np.int8),
        "decimal": decimal.Decimal("0.5"),
        "fraction": fractions.Fraction(1, 4),
        "scalar": Scalar(),
        "judge": float("nan"),
        "far": np.float32("inf"),
        "vast": 10**400,
        "text": "7",
        "text_0d": np.array("7"),
        "several": np.array([1.0]),
        "nothing": None,
        **odd,
    }


def floods(solution_str: str) -> float:
    """Print 50 MB, and then raise an error as long."""
    for _ in range(50):
        print("x" * 1_000_000)
    if solution_str == "raise":
        raise ValueError("y" * 50_000_000)
    return 1.0


def many_measures(solution_str: str) -> dict[str, float]:
    return {"score": 1.0, **{f"m{number}": 1.0 for number in range(101)}}


def reads_a_file(solution_str: str) -> float:
    return float(Path("answers/key.txt").read_text())


def trl_short(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def trl_needs_column(completions: list[str], answer: list[str]) -> list[float]:
    return [1.0]


def judged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, judge=len, **kwargs)

    return wrapper


@judged
def trl_wrapped(completions: list[str], judge: Any) -> list[float]:
    return [float(judge(c)) for c in completions]


def unusual(text: str, truth: str) -> float:
    return 1.0


def raises(solution_str: str) -> float:
    raise KeyError("answer")


def returns_none(solution_str: str) -> None:
    return None


def returns_nan(solution_str: str) -> float:
    return float("nan")


def returns_no_score(solution_str: str) -> dict[str, float]:
    return {"acc": 1.0}


def returns_text(solution_str: str) -> str:
    return "1.0"


def trl_none(completions: list[str]) -> list[None]:
    return [None]


def trl_number(completions: list[str]) -> float:
    return 1.0


def trl_two(completions: list[str]) -> list[float]:
    return [1.0, 0.0]


def slow(solution_str: str) -> float:
    time.sleep(0.2)
    return 1.0


def hangs_on(solution_str: str, extra_info: dict[str, Any]) -> float:
    """Hang on the response `hang`, and note each call in the file that the prompt names."""
    with Path(extra_info["calls"]).open("a") as calls:
        calls.write(f"{solution_str} {os.getpid()}\n")
    while solution_str == "hang":
        time.sleep(1)
    time.sleep(0.05)
    return 1.0


async def hangs_in_a_coroutine(solution_str: str) -> float:
    while solution_str == "hang":
        time.sleep(1)  # noqa: ASYNC251 - that is the mistake
    return 1.0


def never_lets_go(solution_str: str) -> float:
    """Hang in one long call of C, which no thread interrupts."""
    return float(solution_str != "hang" or 9**9**9 % 2)


def exits(solution_str: str) -> float:
    if solution_str == "exit":
        sys.exit(0)
    return 1.0


async def exits_in_a_coroutine(solution_str: str) -> float:
    if solution_str == "exit":
        sys.exit()
    return 1.0


def ends_its_process(solution_str: str) -> float:
    if solution_str == "exit":
        os._exit(0)
    return 1.0


def fails_once(solution_str: str, extra_info: dict[str, Any]) -> float:
    """Fail at the first try, as a function does that asks a judge over the network."""
    if Path(extra_info["tried"]).exists():
        return 1.0
    Path(extra_info["tried"]).touch()
    raise ConnectionError("the judge is away")


def starts_others(solution_str: str, extra_info: dict[str, Any]) -> float:
    """Start a sandbox that reads its input, writes, and still runs when the worker gives up the call."""
    import subprocess

    subprocess.run(["cat"], check=True)
    print("to be seen in the log")
    sandbox = subprocess.Popen(["sleep", "300"])
    Path(extra_info["pid"]).write_text(str(sandbox.pid))
    if solution_str == "hang":
        sandbox.wait()
    sandbox.kill()
    sandbox.wait()
    return 1.0


def where(solution_str: str) -> float:
    return float(os.getpid())

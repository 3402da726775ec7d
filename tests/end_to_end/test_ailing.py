"""Workers that fall ill during a run are named, hand their work back and are replaced; the run completes.

The same happens to a worker that a user puts in quarantine.
"""

from pathlib import Path

import pytest

from headway.broker.schema.status import RunStatus

from .recipes import write_recipe
from .records import check_trained, summary
from .terminals import Terminals
from .watching import Watch, attached

pytestmark = pytest.mark.slow

STEPS = 80
SLOW_WINDOW_S = 15
"""Much longer than a worker may stand still, or one that hangs is taken for a slow one on a busy machine."""
AILING = """
import asyncio
import time
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from headway.algorithms.objectives import ppo_clip
from headway.rollout_workers.engines.embedded.embedded_engine import open_embedded

AILMENTS = {"worker-1": "fails", "worker-2": "hangs", "worker-3": "is slow", "worker-4": "computes otherwise"}
TOKEN_S = {"is slow": 0.8}
UNHURRIED_S = 0.1
FREE_STEPS, TRAINED = 70, count()


def has_seen_all():
    return Path(__file__).with_name("hurry").exists()


def held(current_logprobs, anchor_logprobs, tokens):
    '''The run is not over before the test has seen all: that needs fewer steps, in which all have work.'''
    if next(TRAINED) >= FREE_STEPS:
        while not has_seen_all():
            time.sleep(0.1)
    return ppo_clip(current_logprobs, anchor_logprobs, tokens)


def ailing(config, model_dir, *, seed):
    '''The first process of some places is ill; the next one there is well.'''
    engine, place = open_embedded(config, model_dir, seed=seed), Path.cwd().name
    mark = Path(__file__).with_name(f"{place}.ailed")
    ailment = "" if mark.exists() else AILMENTS.get(place, "")
    mark.touch()
    well = engine.generate

    async def generate(request):
        async for chunk in well(request):
            last = len(chunk.token_ids) - 1
            for n, token in enumerate(chunk.token_ids):
                await asyncio.sleep(TOKEN_S.get(ailment, 0.0 if has_seen_all() else UNHURRIED_S))
                reason = chunk.finish_reason if n == last else None
                yield replace(chunk, token_ids=[token], logprobs=chunk.logprobs[n : n + 1], finish_reason=reason)
            if ailment == "fails":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if ailment == "hangs":
                await asyncio.Event().wait()

    true_score = engine.score

    async def score(token_ids):
        return [logprob - 1.0 for logprob in await true_score(token_ids)]

    engine.generate = generate
    if ailment == "computes otherwise":
        engine.score = score
    return engine
"""
RULES = {"failing": "worker-1", "stalled": "worker-2", "slow": "worker-3", "weights": "worker-4"}


def test_workers_that_fall_ill_are_replaced_and_nothing_is_lost(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "ailing.py").write_text(AILING)
    recipe = write_recipe(
        home,
        engine={"kind": "ailing:ailing", "max_concurrent": 4},
        learner={"steps": STEPS},
        algorithm={"objective": {"kind": "ailing:held"}},
        workers={"count": 5, "stall_s": 3, "slow_window_s": SLOW_WINDOW_S},
    )
    headway = terminals.open("run", "run", recipe)
    run = home / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        status = watch.until("all are named", lambda status: {fault.rule for fault in status.faults} >= set(RULES))
        check_faults(status)
        status = watch.until("others have their places", lambda status: places(status) == {0, 1, 2, 3, 4})
        check_quarantine(terminals, watch, status)
        watch.until("the learner has looked", lambda status: "it is slow" in (run / "logs/learner.log").read_text())
        (home / "hurry").touch()
    headway.succeeds()
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    assert summary(run)["worker_restarts"] == len(RULES) + 1
    check_told(headway.said, run)


def check_quarantine(terminals: Terminals, watch: Watch, status: RunStatus) -> None:
    """Assert that a well worker in which a user has lost trust ends, and that another process takes its place."""
    (name,) = (info.worker for info in status.workers if "-worker-0-" in info.worker)
    terminals.open("run", "quarantine", name).succeeds()
    watch.until(
        "another is in its place",
        lambda status: 0 in places(status) and name not in {info.worker for info in status.workers},
    )


def check_faults(status: RunStatus) -> None:
    for fault in status.faults:
        assert f"-{RULES[fault.rule]}-" in fault.worker
    reasons = {fault.rule: fault.reason for fault in status.faults}
    assert "the engine failed 3 times within 600 s" in reasons["failing"]
    assert "RuntimeError: CUDA error: an illegal memory access" in reasons["failing"]
    assert "and has sampled nothing for 3 s (workers.stall_s)" in reasons["stalled"]
    assert f"less than 25% of both over {SLOW_WINDOW_S} s" in reasons["slow"]
    assert "the engine's logprobs differ from the learner's by a mean of 1 where" in reasons["weights"]


def places(status: RunStatus) -> set[int]:
    """Return the places of the workers that are well."""
    ill = {fault.worker for fault in status.faults}
    return {int(info.worker.split("-")[-2]) for info in status.workers if info.worker not in ill}


def check_told(said: str, run: Path) -> None:
    shown, log = " ".join(said.split()), (run / "logs/learner.log").read_text()
    assert all(f"{RULES[rule]} exited with code 80" in shown for rule in ("failing", "stalled", "weights"))
    assert "worker-3 was set aside (slow): it generates" in shown
    assert shown.count("Another process takes its place in") == len(RULES)
    for text in (shown, log):
        assert "was set aside, as its engine hangs" in text
        assert "was set aside, as its engine fails again and again" in text
        assert "was set aside, as it is slow" in text

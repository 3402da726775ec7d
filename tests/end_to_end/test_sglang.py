"""Workers with SGLang train a run, alone and beside another engine's, and one of them is killed meanwhile.

`make test-sglang` runs these tests in an environment with SGLang, and names the `headway` of the one without it, which
then starts server, learner and the other engine's workers: so does a user who has both.
"""

import os
import signal
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from headway.broker.schema.status import RunStatus
from headway.broker.staleness import oldest_step
from headway.deploy.run.run_directory import EXPERIENCE
from headway.learner.experience.log import ExperienceLog
from tests.broker.topologies import free_port, wait_until
from tests.processes import is_alive, shared_memory_of
from tests.rollout_workers.marks import SGLANG

from .recipes import MODEL, write_recipe
from .records import check_trained, summary
from .terminals import HEADWAY, Terminal, Terminals, paused
from .test_pools import WIDER, busy, of_pool
from .test_separate_roles import RUN, exported
from .watching import attached, watching

pytestmark = SGLANG

MAIN = os.environ.get("HEADWAY_TEST_MAIN", HEADWAY)
"""The `headway` of the environment without SGLang."""
STEPS = 40


def test_a_run_with_sglang_learns_and_outlives_a_killed_worker(terminals: Terminals) -> None:
    recipe = write_recipe(
        terminals.directory("run"),
        learner={"steps": STEPS},
        engine={"kind": "sglang"},
        workers={"count": 1},
    )
    headway = terminals.open("run", "run", recipe)
    run = terminals.root / "run" / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        status = watch.until_step(3)
        kill_with_its_engine(status.workers[0].pid)
    headway.succeeds()
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    told = (run / "logs" / "worker-0.log").read_text()
    assert told.count("engine sglang is up\n") == 2, "SGLang has a log of its own, and takes none of ours"
    found = summary(run)
    assert found["worker_restarts"] == 1, headway.said
    assert found["reward_last"] > 2 * found["reward_first"]


@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_pools_of_two_environments_train_one_run(terminals: Terminals, kind: str) -> None:
    server = terminals.open("server", "broker", "--port", str(free_port()), headway=MAIN)
    learns, works, looks = [exported(terminals, server, command) for command in ("learner", "workers", "status")]
    recipe = write_recipe(
        terminals.directory("learner"),
        model={"random": {**MODEL["random"], "config": {**MODEL["random"]["config"], **WIDER}}},
        learner={"steps": 6 * STEPS},
        engine={"max_concurrent": 4},
        checkpoint={"every_steps": 20},
    )
    with watching(looks["HEADWAY_BROKER"], RUN, terminals) as watch:
        learner = terminals.open("learner", "learner", recipe, headway=MAIN, **learns)
        other = terminals.open("other", "workers", "--pool", "other", f"engine.kind={kind}", headway=MAIN, **works)
        sglang = terminals.open("sglang", "workers", "--pool", "sglang", "engine.kind=sglang", **works)
        watch.until("some pool generates", lambda status: bool(busy(status, other) or busy(status, sglang)))
        with paused(learner.pid):  # the run might be over before the other one is there
            watch.until("both are there", lambda status: bool(of_pool(status, other) and of_pool(status, sglang)))
        status = watch.until("both take broadcasts and generate", lambda status: both(status, other, sglang))
        with paused(learner.pid):
            kill_with_its_engine(of_pool(status, sglang)[0].pid)
            watch.until("another is in its place", lambda status: bool(of_pool(status, sglang)))
        watch.until("both do so again", lambda status: both(status, other, sglang))
        watch.until("the run is over", lambda status: status.state == "finished")
    for terminal in (learner, other, sglang):
        terminal.succeeds()
    run = terminals.root / "learner" / "runs" / RUN
    check_trained(run, steps=6 * STEPS, trajectories_per_step=16, max_lag=2)
    check_both_were_trained(run)


def by_pool(run: Path) -> dict[str, list[int]]:
    """Return the lags of the trained samples of each pool, whose workers are called HOST-POOL-NUMBER-TAG."""
    log, lags = ExperienceLog(run / EXPERIENCE), defaultdict[str, list[int]](list)
    for step in range(6 * STEPS):
        for group in log.read(step) or ():
            for one in group.trajectories:
                lags[one.worker.rsplit("-", 3)[-3]].append(step - oldest_step(one.spans))
    return lags


def check_both_were_trained(run: Path) -> None:
    """Assert that each engine sampled a part of what was trained, within the bound on lag, and that it was learned."""
    pools = by_pool(run)
    assert pools.keys() == {"other", "sglang"}
    assert sum(map(len, pools.values())) == 6 * STEPS * 16
    assert max(lag for lags in pools.values() for lag in lags) <= 2
    found = summary(run)
    assert found["reward_last"] > 2 * found["reward_first"]


def both(status: RunStatus, *terminals: Terminal) -> bool:
    """Return whether a worker of each of the two terminals is in a broadcast group and has submitted samples."""
    return all(any(info.broadcast_epoch for info in busy(status, terminal)) for terminal in terminals)


def kill_with_its_engine(pid: int) -> None:
    """Kill the worker as a crash would, and assert that nothing is left of what its engine started, and made."""
    worker = psutil.Process(pid)
    engine, shared, temporary = worker.children(recursive=True), shared_memory_of(pid), Path(worker.environ()["TMPDIR"])
    assert any("sglang::scheduler" in " ".join(one.cmdline()) for one in engine)
    assert list(temporary.glob("headway-sglang-*/loads"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(one) for one in engine))
    wait_until(lambda: not any(path.exists() for path in (temporary, *shared)))

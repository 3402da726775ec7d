"""Pools grow, shrink, die and join while one run goes on, when commands in other terminals ask for it."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil

from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from tests.broker.topologies import free_port
from tests.rollout_workers.marks import VLLM

from .recipes import MODEL, write_recipe
from .records import check_trained
from .terminals import Terminal, Terminals, paused
from .test_separate_roles import RUN, exported
from .watching import watching

pytestmark = VLLM

STEPS = 120
WIDER = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}
"""Sizes for vLLM's CPU kernels, which have no smaller heads and pad smaller experts."""


def test_pools_of_two_engines_are_scaled_killed_and_drained_and_the_run_completes(terminals: Terminals) -> None:
    server = terminals.open("server", "broker", "--port", str(free_port()))
    learns, works, looks = [exported(terminals, server, command) for command in ("learner", "workers", "status")]
    recipe = write_recipe(
        terminals.directory("learner"),
        model={"random": {**MODEL["random"], "config": {**MODEL["random"]["config"], **WIDER}}},
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 4},
        engine={"max_concurrent": 4},
        checkpoint={"every_steps": 20},
    )
    with watching(looks["HEADWAY_BROKER"], RUN, terminals) as watch:
        main = terminals.open("main", "workers", "--pool", "main", **works)
        learner = terminals.open("learner", "learner", recipe, **learns)
        watch.until("the pool generates", lambda status: len(busy(status, main)) == 1)

        with paused(learner.pid):  # the run might be over before the newcomers have imported torch
            other = terminals.open("other", "workers", "--pool", "other", "engine.kind=vllm", **works)
            scale(terminals, "4", "--pool", "main", **learns)
            status = watch.until("four are there", lambda status: len(of_pool(status, main)) == 4)
            for victim in of_pool(status, main)[:2]:
                os.kill(victim.pid, signal.SIGKILL)
            dead = {victim.pid for victim in of_pool(status, main)[:2]}
            watch.until("they are replaced", lambda status: len(alive(status, main) - dead) == 4)

            status = watch.until("one may leave", lambda status: bool(of_pool(status, main)))
            drained = of_pool(status, main)[-1]
            terminals.open("draining", "drain", drained.worker, **learns).succeeds()
            watch.until("it has left", has(lambda pool: (pool.wanted, pool.running) == (4, 3)))

            watch.until("vLLM is there", lambda status: bool(of_pool(status, other)))
            scale(terminals, "0", "--pool", "main", **learns)
            watch.until("all have left", has(lambda pool: (pool.running, pool.leaving) == (0, 0)))
        # vLLM's first tokens take half a minute: the other pool alone could end the run before. So could vLLM alone,
        # while the other pool imports torch.
        watch.until("vLLM generates", lambda status: bool(busy(status, other)))
        with paused(learner.pid):
            scale(terminals, "4", "--pool", "main", **learns)
            watch.until("four are there again", lambda status: len(of_pool(status, main)) == 4)
        watch.until("both engines generate", lambda status: bool(busy(status, main)) and bool(busy(status, other)))

        watch.until_step(25)
        learner.send(signal.SIGKILL)  # Ctrl-C would end the run, and the workers with it
        learner.wait()
        learner = terminals.open("learner", "learner", recipe, "--resume", **learns)
        watch.until("it has resumed", lambda status: status.incarnation == 2 and status.state == "training")
        with paused(learner.pid):
            scale(terminals, "-2", "--pool", "main", **learns)
            watch.until("some have left", has(lambda pool: (pool.wanted, pool.running, pool.leaving) == (2, 2, 0)))
        watch.until("the run is over", lambda status: status.state == "finished")
    for terminal in (learner, main, other):
        terminal.succeeds()
    check_trained(terminals.root / "learner" / "runs" / RUN, steps=STEPS, trajectories_per_step=16, max_lag=2)


def scale(terminals: Terminals, *arguments: str, **environment: str) -> None:
    terminals.open("scaling", "scale", *arguments, **environment).succeeds()


def of_pool(status: RunStatus, terminal: Terminal) -> list[WorkerInfo]:
    """Return the living workers below the supervisor in this terminal, by process id."""
    found = []
    for info in status.workers:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(info.pid).ppid() == terminal.pid:
                found.append(info)
    return sorted(found, key=lambda info: info.pid)


def alive(status: RunStatus, terminal: Terminal) -> set[int]:
    return {info.pid for info in of_pool(status, terminal)}


def busy(status: RunStatus, terminal: Terminal) -> list[WorkerInfo]:
    return [info for info in of_pool(status, terminal) if info.submitted > 0]


def has(is_so: Callable[[PoolInfo], bool]) -> Callable[[RunStatus], bool]:
    """Return a predicate that holds where this is so of the pool `main`."""
    return lambda status: any(pool.pool == "main" and is_so(pool) for pool in status.pools)

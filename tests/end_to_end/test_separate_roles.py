"""Four terminals start server, learner and workers one by one; they share a network and nothing else.

Workers come and go meanwhile: one joins, one is drained, one is killed.
"""

import json
import re
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from headway.broker import BlockingBroker
from headway.broker.schema.status import RunStatus, WorkerInfo
from tests.broker.topologies import free_port, wait_until

from .recipes import write_recipe
from .records import check_trained, summary
from .terminals import Terminal, Terminals, paused
from .watching import Watch, watching

RUN, STEPS = "four", 150
GRACE_S = 30
SLOW_SEVENS = """
import time
from pathlib import Path

TMP = Path(__file__).with_name("tmp")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if (TMP / "slow").exists():
        (TMP / "scoring").touch()
        time.sleep(60)
    return {"score": solution_str.count("7") / 16, "length": len(solution_str)}
"""
"""The source of the reward on the machine that is taken away: it becomes slow once the file `slow` is there."""


@pytest.mark.slow
def test_workers_come_and_go_and_the_run_completes(terminals: Terminals) -> None:
    server = terminals.open("server", "broker", "--port", str(free_port()))
    learns, works, looks = [exported(terminals, server, command) for command in ("learner", "workers", "status")]
    with watching(looks["HEADWAY_BROKER"], RUN, terminals) as watch:
        drained = terminals.open("drained", "workers", "--grace-s", str(GRACE_S), **works)
        (drained.directory / "sevens.py").write_text(SLOW_SEVENS)
        killed = terminals.open("killed", "workers", **works)
        misuse_password(works["HEADWAY_BROKER"])
        learner = terminals.open("learner", "learner", learners_recipe(terminals), **learns)
        watch.until("both generate", lambda status: all(is_busy(status, worker) for worker in (drained, killed)))
        watch.until_step(2)
        check_status(terminals, looks["HEADWAY_BROKER"])
        check_nobody_takes_it_away(terminals, learner, learns)

        with paused(learner.pid):  # or the run might be over before the newcomer has imported torch
            joined = terminals.open("joined", "workers", **works)
            watch.until("the newcomer is there", lambda status: info_of(status, joined) is not None)
        watch.until("it generates", lambda status: is_busy(status, joined))

        take_away(watch, drained)

        watch.until("the next victim holds leases", lambda status: is_busy(status, killed))
        killed.send(signal.SIGKILL)
        with paused(learner.pid):  # or the run might be over before
            watch.until("it is missed", lambda status: info_of(status, killed) is None)
        # The killed worker's samples are leased until their deadline; no run ends without them.
        watch.until("the run is over", lambda status: status.state == "finished")
    learner.succeeds()
    assert re.search(rf"^Finished\. See how it went: \S*headway report runs/{RUN}$", learner.said, re.MULTILINE)
    joined.succeeds()
    server.send(signal.SIGINT)
    server.succeeds()
    run = terminals.root / "learner" / "runs" / RUN
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    assert summary(run)["mixed_version_trajectories"] > 0
    assert summary(run)["weight_versions"] == STEPS + 1
    check_nothing_is_shared(terminals)
    assert "a process uses a worker's password" in " ".join(learner.said.split())
    for terminal in (learner, joined):
        assert "Warning" not in terminal.said, terminal.said


@pytest.mark.slow
def test_a_pool_repairs_what_others_end_and_the_summary_counts_it(terminals: Terminals) -> None:
    server = terminals.open("server", "broker", "--port", str(free_port()))
    learns, works, looks = [exported(terminals, server, command) for command in ("learner", "workers", "status")]
    with watching(looks["HEADWAY_BROKER"], RUN, terminals) as watch:
        pool = terminals.open("pool", "workers", "--pool", "big", **works)
        learner = terminals.open("learner", "learner", learners_recipe(terminals, steps=50_000), **learns)
        status = watch.until("it generates", lambda status: any(one.submitted for one in status.workers))
        for number in (signal.SIGTERM, signal.SIGKILL):
            (victim,) = [one for one in status.workers if psutil.pid_exists(one.pid)]
            psutil.Process(victim.pid).send_signal(number)
            status = watch.until(
                "another generates in its place",
                lambda status, pid=victim.pid: any(one.submitted for one in status.workers if one.pid != pid),  # type: ignore[misc]
            )
        scaled = terminals.open("scaling", "scale", "+1", "--pool", "big", "--wait", **learns)
        scaled.succeeds()
        status = watch.until("a look", lambda status: True)
        (big,) = status.pools
        assert (big.wanted, big.working, big.restarts) == (2, 2, 2)
        assert status.queues.worker_restarts == 2
        learner.send(signal.SIGINT)
        learner.wait()
        pool.send(signal.SIGTERM)
        pool.succeeds()
    assert summary(terminals.root / "learner" / "runs" / RUN)["worker_restarts"] == 2


def take_away(watch: Watch, drained: Terminal) -> None:
    """Take a worker away as a spot machine, while its rewards are slow: other workers continue its samples."""
    tmp = drained.directory / "tmp"
    (tmp / "slow").touch()
    before = watch.until("a sample is scored slowly", lambda status: (tmp / "scoring").exists())
    drained.send(signal.SIGTERM)
    drained.succeeds()
    assert "killed" not in drained.said
    status = watch.until("it has left", lambda status: info_of(status, drained) is None)
    assert status.state == "training"
    resumed = before.queues.resumed_tokens
    status = watch.until("others go on with its samples", lambda status: status.queues.resumed_tokens > resumed)
    assert status.queues.expired_leases == 0


def exported(terminals: Terminals, server: Terminal, command: str) -> dict[str, str]:
    """Return the variables that `headway broker` has the terminal of `headway COMMAND` export."""
    wait_until(lambda: "Passwords are in the files" in server.said)
    lines = server.said.splitlines()
    (position,) = [number for number, line in enumerate(lines) if line.startswith(f"  headway {command}")]
    settings = dict(word.split("=", 1) for word in shlex.split(lines[position - 1])[1:])
    return {**settings, "HEADWAY_RUN": RUN}


def misuse_password(url: str) -> None:
    """Store bytes under a key to which no worker of Headway writes."""
    blocking = BlockingBroker(url, RUN)
    connection = blocking.broker._connection
    blocking.call(connection.execute("SET", connection.keys("hidden:x"), b"junk"))
    blocking.close()


def learners_recipe(terminals: Terminals, steps: int = STEPS) -> Path:
    """Write the learner's recipe. Engines smaller than a batch are rarely idle, so a killed worker has leases."""
    return write_recipe(
        terminals.directory("learner"),
        learner={"steps": steps, "groups_per_step": 4, "group_size": 4},
        engine={"max_concurrent": 4},
        checkpoint={"every_steps": 20},
    )


def info_of(status: RunStatus, terminal: Terminal) -> WorkerInfo | None:
    """Return the report of the worker in `terminal` or below it; None once the worker is dead or gone."""
    for info in status.workers:
        with suppress(psutil.NoSuchProcess):
            if terminal.pid in (info.pid, psutil.Process(info.pid).ppid()):
                return info
    return None


def is_busy(status: RunStatus, terminal: Terminal) -> bool:
    info = info_of(status, terminal)
    return info is not None and info.active > 0 and info.submitted > 0


def check_status(terminals: Terminals, url: str) -> None:
    """Check the output of `headway status --json`, from a fifth terminal."""
    looking = terminals.open("looking", "status", "--broker", url, "--run", RUN, "--json")
    looking.succeeds()
    status = json.loads(looking.said)
    assert status["run"] == RUN
    assert status["state"] == "training"
    incarnation, _, step = status["announced"].partition(".")
    assert (incarnation, int(step) >= 2) == ("1", True)
    assert {"pool", "open", "ready", "leased", "pinned", "expired_leases"} <= status["queues"].keys()
    assert len(status["workers"]) == 2
    assert all(worker["version"].startswith("1.") for worker in status["workers"])
    assert set(status["lag_histogram"]) <= {"0", "1", "2"}
    assert sum(status["lag_histogram"].values()) >= 16
    assert status["throughput"].keys() == {"generated_tokens_per_s", "trained_tokens_per_s"}


def check_nobody_takes_it_away(terminals: Terminals, learner: Terminal, learns: dict[str, str]) -> None:
    """Check that commands in another directory, as if on another host, cannot take the run away.

    They run at the same time, because the run goes on meanwhile.
    """
    recipe = learners_recipe(terminals)
    overwriting = terminals.open("rival", "learner", recipe, "--overwrite", **learns)
    deleting = terminals.open("deleting", "runs", "delete", RUN, "--yes", HEADWAY_BROKER=learns["HEADWAY_BROKER"])
    second = terminals.open("learner", "learner", recipe, "--resume", **learns)
    for rival in (overwriting, deleting):
        assert rival.wait() == 1
        assert f"Run {RUN} is in use (training): its learner is process {learner.pid} of " in rival.said
        assert "2 workers are alive: " in rival.said
        terminals.expect_failure(rival)
    assert not (terminals.root / "rival" / "runs" / RUN).exists()
    assert second.wait() == 1
    assert f"runs/{RUN}: process {learner.pid} of " in second.said
    terminals.expect_failure(second)


def check_nothing_is_shared(terminals: Terminals) -> None:
    """Check that a worker's directory is as empty as before, and that only the learner has a run."""
    assert {path.parents[1].name for path in terminals.root.glob("*/runs/*/")} == {"learner"}
    for name in ("drained", "joined"):
        left = {path.name for path in (terminals.root / name).iterdir()}
        assert left - {".cache", "__pycache__"} == {"tmp", "sevens.py", "terminal.log"}

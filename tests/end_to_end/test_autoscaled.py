"""The autoscaler over a real run adds workers when the load rises, and removes them when it drops."""

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .recipes import write_recipe
from .records import check_trained, summary
from .terminals import Terminals, paused
from .test_separate_roles import RUN, exported, free_port
from .watching import watching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, MOST = 10_000, 3
"""More steps than the pool needs to grow and to shrink; the test then stops the learner."""
PACED = '''"""A reward that takes as long as the file `pace` says."""

import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(Path(__file__).with_name("pace").read_text()))
    return solution_str.count("7") / 16
'''


def test_a_pool_follows_a_rise_of_the_load_out_and_a_drop_in(terminals: Terminals) -> None:
    server = terminals.open("server", "broker", "--port", str(free_port()))
    learns, works, looks = [exported(terminals, server, command) for command in ("learner", "workers", "status")]
    for name in ("learner", "pool"):
        (terminals.directory(name) / "paced.py").write_text(PACED)
        (terminals.root / name / "pace").write_text("0.5")
    pace = terminals.root / "pool" / "pace"
    recipe = write_recipe(
        terminals.directory("learner"), learner={"steps": STEPS}, rewards=[{"kind": "paced:compute_score"}]
    )
    with watching(looks["HEADWAY_BROKER"], RUN, terminals) as watch:
        pool = terminals.open("pool", "workers", "--count", "1", **works)
        learner = terminals.open("learner", "learner", recipe, **learns)
        watch.until_step(1)
        said = ("--most", str(MOST), "--steps", "4", "--cooldown-s", "1", "--json")
        scaler = terminals.open("scaler", "autoscale", *said, **learns)
        watch.until("it has grown", lambda status: status.pools[0].running == MOST)
        with hindered(learner.pid):
            pace.write_text("0")
            watch.until("it has shrunk", lambda status: status.pools[0].running < MOST)
        learner.send(signal.SIGTERM)
        watch.until("the run is over", lambda status: status.state == "stopped")
    for terminal in (learner, pool, scaler):
        terminal.succeeds()
    run = terminals.root / "learner" / "runs" / RUN
    check_trained(run, steps=summary(run)["steps"], trajectories_per_step=16, max_lag=2)
    decisions = [json.loads(line) for line in scaler.said.splitlines() if line.startswith("{")]
    told = [(look["load"]["wanted"], look["decision"]["wanted"], look["decision"]["reason"]) for look in decisions]
    assert all(earlier != later for earlier, later in itertools.pairwise(told)), told
    changes = [look for look in decisions if look["decision"]["wanted"] != look["load"]["wanted"]]
    assert [look["load"]["wanted"] for look in changes][:2] == [1, 2], changes
    for look in changes:
        is_out = look["decision"]["wanted"] > look["load"]["wanted"]
        assert ("starves" if is_out else "more than is trained") in look["decision"]["reason"], look
        assert look["load"]["wait"] > 0.1 if is_out else look["load"]["wait"] <= 0.05, look


@contextmanager
def hindered(pid: int, *, share: float = 0.8, period_s: float = 0.5) -> Iterator[None]:
    """Stop that process for this share of the time, as if others used its machine."""
    over = threading.Event()

    def hinder() -> None:
        while not over.wait(period_s * (1 - share)):
            with paused(pid):
                time.sleep(period_s * share)

    thread = threading.Thread(target=hinder)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

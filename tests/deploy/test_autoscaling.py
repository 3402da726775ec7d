"""The autoscaler's rule finds the number of workers that simulated pools need, and stays there.

Other tests have it look at a run on a real broker whose learner and workers are scripted.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as changed

from headway.broker import BlockingBroker
from headway.broker.schema.status import PoolInfo, QueueAges
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.observe.status_tables import workers_of
from headway.deploy.recipe.resolve import load_recipe, recipe_to_bytes
from headway.deploy.roles.autoscaler import Autoscaler, Autoscaling, Load, Targets, keep_scaling
from tests.broker.scenario import FRESH, rules
from tests.broker.test_codec import STEP, WORKER
from tests.broker.topologies import wait_until

from .runs import run_status, worker

TARGETS = Targets(least=1, most=32, steps=4)
WAITING = changed(STEP, take_s=0.4, train_s=0.6, step_s=1.0, lag_mean=1.0)
CALM = Load(wanted=4, running=4, steps=9, wait=0.07, busy=0.9, lag=0.5, train_s=1.0)


@dataclass
class Simulation:
    """A learner that trains `batch` samples a step for `train_s` seconds, and workers that each sample `rate` a second.

    Admission allows at most `batch * (max_lag + 1)` samples under way or ready.
    """

    workers: int
    rate: float
    train_s: float = 1.0
    batch: int = 64
    max_lag: int = 2
    places: int = 16
    ready: float = field(default=0.0, init=False)

    @property
    def needed(self) -> int:
        """Return the fewest workers with which the learner hardly waits."""
        return math.ceil(self.batch / self.train_s / self.rate)

    def step(self) -> tuple[float, float, float]:
        """Return the seconds that the learner waited in a step, the share of used places, and the queue's fill."""
        rate = self.workers * self.rate
        waited = max(0.0, (self.batch - self.ready) / rate)
        self.ready = max(self.ready + waited * rate, self.batch) - self.batch
        room = self.batch * self.max_lag - self.ready
        made = min(rate * self.train_s, room)
        self.ready += made
        busy = 1.0 if waited else made / (rate * self.train_s)
        return waited, busy, min(self.ready / (self.batch * self.max_lag), 1.0)


def play(simulation: Simulation, scaler: Autoscaler, rounds: int) -> list[int]:
    """Let the rule decide after every few steps, and return the numbers of workers that it chose."""
    chosen = []
    for _ in range(rounds):
        observations = [simulation.step() for _ in range(TARGETS.steps)]
        waited = sum(look[0] for look in observations)
        load = Load(
            wanted=simulation.workers,
            running=simulation.workers,
            steps=TARGETS.steps,
            wait=waited / (waited + len(observations) * simulation.train_s),
            busy=sum(look[1] for look in observations) / len(observations),
            lag=observations[-1][2],
            train_s=simulation.train_s,
        )
        simulation.workers = scaler.decide(load).wanted
        chosen.append(simulation.workers)
    return chosen


@pytest.mark.parametrize("begin", [1, 3, 32])
def test_it_finds_the_number_that_is_needed_and_stays_there(begin: int) -> None:
    simulation = Simulation(workers=begin, rate=8.0)
    assert_settled(simulation, play(simulation, Autoscaler(TARGETS), 30))


def test_a_step_of_the_load_is_followed_out_and_a_drop_in(scaler: Autoscaler) -> None:
    simulation = Simulation(workers=4, rate=16.0)
    assert_settled(simulation, play(simulation, scaler, 20))
    simulation.rate = 8.0  # responses are twice as long
    during = play(simulation, scaler, 20)
    assert during == sorted(during)
    assert_settled(simulation, during)
    simulation.train_s = 2.0  # the learner is half as fast
    after = play(simulation, scaler, 30)
    assert max(after) < during[-1]
    assert_settled(simulation, after)


def test_a_queue_that_ages_scales_in_before_the_lag_shows_it(scaler: Autoscaler) -> None:
    """The age of waiting samples grows with the queue; the samples trained now tell nothing of it yet."""
    simulation = Simulation(workers=16, rate=16.0)
    chosen = []
    for _ in range(30):
        observations = [simulation.step() for _ in range(TARGETS.steps)]
        waited = sum(look[0] for look in observations)
        wait = waited / (waited + len(observations) * simulation.train_s)
        load = replace(CALM, wanted=simulation.workers, running=simulation.workers, wait=wait, age=observations[-1][2])
        simulation.workers = scaler.decide(load).wanted
        chosen.append(simulation.workers)
    assert_settled(simulation, chosen)


def assert_settled(simulation: Simulation, chosen: list[int]) -> None:
    assert len(set(chosen[-10:])) == 1
    assert simulation.needed - 1 <= chosen[-1] <= simulation.needed + 1


@pytest.fixture
def scaler() -> Autoscaler:
    return Autoscaler(TARGETS)


@pytest.mark.parametrize(
    ("changes", "wanted", "said"),
    [
        ({}, 4, "within the targets"),
        ({"running": 3}, 4, "3 of 4 workers run: the others still start."),
        ({"steps": 3}, 4, "The learner has made 3 of 4 steps since the last change: too few to judge by."),
        ({"wanted": 40, "running": 40}, 32, "40 workers are wanted: that is outside of the limits."),
        ({"wanted": 0, "running": 0}, 1, "outside of the limits"),
        (
            {"wait": 0.4},
            6,
            "The learner waits 40% of its time, engines are 90% busy, lag is 50% and the queue's age 0% of the steps"
            " for which samples are begun ahead: the learner starves.",
        ),
        ({"wait": 0.99}, 8, "the learner starves"),
        ({"wait": 0.4, "busy": 0.3}, 4, "not for want of workers"),
        ({"wait": 0.4, "wanted": 32, "running": 32}, 32, "32 are the most allowed"),
        ({"wait": 0.0, "busy": 0.5}, 3, "workers generate more than is trained"),
        ({"wait": 0.0, "busy": 0.1}, 2, "workers generate more than is trained"),
        ({"wait": 0.0, "lag": 0.95}, 3, "workers generate more than is trained"),
        ({"wait": 0.0, "age": 0.95}, 3, "and the queue's age 95% of the steps for which"),
        ({"wait": 0.4, "age": 0.95}, 6, "the learner starves"),
        ({"wait": 0.0, "busy": 0.1, "wanted": 1, "running": 1}, 1, "that is the least"),
    ],
)
def test_each_decision_follows_the_stated_rule(
    scaler: Autoscaler, changes: dict[str, float], wanted: int, said: str
) -> None:
    found = scaler.decide(replace(CALM, **changes))  # type: ignore[arg-type]
    assert found.wanted == wanted
    assert said in str(found)


def test_it_does_not_shrink_to_where_the_learner_starved_until_the_pace_is_another(scaler: Autoscaler) -> None:
    scaler.decide(replace(CALM, wanted=3, running=3, wait=0.3))
    idle = replace(CALM, wait=0.0, busy=0.4)
    found = scaler.decide(idle)
    assert (found.wanted, found.reason) == (4, "fewer workers would do, but the learner starved with 3")
    assert scaler.decide(replace(idle, train_s=1.5)).wanted == 2


def test_the_queues_age_is_measured_by_the_time_of_a_step() -> None:
    steps = tuple(changed(WAITING, step=step) for step in range(4))
    status = changed(run_status(0), recent_steps=steps, last_step=steps[-1], ages=QueueAges(oldest_ready_s=3.0))
    pool = PoolInfo(pool="big", host="h", pid=7, running=4)
    assert [Load.of(status, pool, 0, ahead, TARGETS, [1.0]).age for ahead in (4, 1.5, 0)] == [0.75, 2.0, 0.0]


def test_each_pool_is_judged_by_its_own_workers() -> None:
    pools = tuple(PoolInfo(pool=pool, host="n-1", pid=7, running=2) for pool in ("workers", "big", "very-big", "n-1-7"))
    names = ("n-1-worker-0-aa", "n-1-big-0-bb", "n-1-big-1-cc", "n-1-very-big-0-dd")
    status = changed(run_status(), pools=pools, workers=tuple(worker(name, None) for name in names))
    found = {pool.pool: [info.worker for info in workers_of(status, pool)] for pool in pools}
    assert found == {"workers": [names[0]], "big": [*names[1:3]], "very-big": [names[3]], "n-1-7": [names[0]]}
    ray = changed(status, workers=(worker("elsewhere", None),))
    assert workers_of(ray, pools[1]) == ray.workers


LONG_S = 50.0


@pytest.mark.parametrize(("dry_run", "wanted"), [(False, 6), (True, 4)])
def test_what_it_decides_of_a_run_reaches_the_pools_supervisor(
    server: EmbeddedServer, run_name: str, monkeypatch: pytest.MonkeyPatch, dry_run: bool, wanted: int
) -> None:
    monkeypatch.setattr("headway.deploy.roles.autoscaler.LOOK_S", 0.01)
    client = BlockingBroker(server.url, run_name)
    broker = client.broker
    recipe = load_recipe("arithmetic.yaml")
    claim = client.call(
        broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=recipe_to_bytes(recipe), resume=False)
    )
    client.call(broker.status.set_state(claim.owner, "training"))
    info = PoolInfo(pool="workers", host="h", pid=7, running=4)
    client.call(broker.pools.report(info, 4, LONG_S))
    client.call(broker.status.heartbeat(changed(WORKER, capacity=8, active=12), LONG_S))

    def make(steps: int) -> None:
        for step in range(steps):
            client.call(broker.status.report_step(claim.owner, changed(WAITING, step=step)))

    observations = Autoscaling(client, "", TARGETS, 0.0, dry_run).observations()
    assert "has made 0 of 4 steps" in next(observations).decision.figures
    make(4)
    look = next(observations)
    assert look.load.wait == pytest.approx(0.4)
    assert (look.load.busy, look.load.lag, look.load.train_s) == (1.0, 0.5, 0.6)
    assert look.decision.wanted == 6
    assert client.call(broker.pools.report(info, 4, LONG_S)) == wanted
    client.call(broker.status.set_state(claim.owner, "finished"))
    assert list(observations) == []
    client.close()


@pytest.mark.parametrize(("ahead", "lag", "wanted"), [(1.0, 0.95, 3), (None, 0.475, 4)])
def test_a_pool_that_begins_all_that_is_admitted_shrinks_also_where_admission_is_below_the_bound_on_lag(
    server: EmbeddedServer, run_name: str, ahead: float | None, lag: float, wanted: int
) -> None:
    client = BlockingBroker(server.url, run_name)
    with closing(client):
        broker, of_run = client.broker, changed(rules(2), ahead=ahead)
        claim = client.call(broker.batches.claim(checkpoint=FRESH, rules=of_run, config=b"recipe", resume=False))
        client.call(broker.status.set_state(claim.owner, "training"))
        client.call(broker.pools.report(PoolInfo(pool="workers", host="h", pid=7, running=4), 4, LONG_S))
        client.call(broker.status.heartbeat(changed(WORKER, capacity=8, active=12), LONG_S))
        observations = Autoscaling(client, "", TARGETS, 0.0, True).observations()
        next(observations)
        for step in range(4):
            made = changed(WAITING, step=step, take_s=0.0, lag_mean=0.95)
            client.call(broker.status.report_step(claim.owner, made))
        look = next(observations)
        assert (look.load.busy, look.load.lag, look.decision.wanted) == (1.0, lag, wanted)


def test_it_waits_for_a_learner_and_says_when_the_run_is_over(
    server: EmbeddedServer, run_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_look = threading.Event()  # not between the two calls below
    monkeypatch.setattr("headway.deploy.roles.run_client.time", SimpleNamespace(sleep=lambda _: may_look.wait(LONG_S)))

    def keep() -> None:
        keep_scaling(server.url, run_name, "", TARGETS, cooldown_s=0.0, dry_run=True, as_json=False)

    client = BlockingBroker(server.url, run_name)
    with closing(client), ThreadPoolExecutor(1) as threads:
        scaling, broker = threads.submit(keep), client.broker
        wait_until(lambda: scaling.done() or "Waiting for it." in capsys.readouterr().err)
        assert not scaling.done()
        claim = client.call(broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"recipe", resume=False))
        client.call(broker.status.set_state(claim.owner, "finished"))
        may_look.set()
        scaling.result(timeout=LONG_S)
    assert capsys.readouterr().out == "The run is over.\n"

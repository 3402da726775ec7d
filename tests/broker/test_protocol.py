"""The protocol under any order of verbs, crashes, rollbacks and damage that hypothesis finds, on a real server.

After every verb the test checks the server's keys against each other (`audit`), the changes against the allowed ones
(`transitions`), and the delivered batches against the contract (`model`). In the end an undisturbed learner and worker
must train every group once. HEADWAY_HYPOTHESIS=long searches for hours rather than seconds.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from headway.broker import Broker
from headway.broker.errors import FencedError, ServerRestartedError
from headway.broker.schema import RunRules, TrajectoryId

from .audit import Audit, Auditor
from .model import Batch, Checkpoint, Cursor, Model, Samples, groups_of
from .roles import Flight, Learner, Worker
from .scenario import group_id, manifest, prompt
from .transitions import judge_learner, judge_worker

T = TypeVar("T")

WORKERS = 3
PROMPTS = 8
PATIENCE = 60
"""The number of rounds in which an undisturbed run must come to its end."""
SOME = st.integers(0, 11)
"""Chooses one of any number of things."""
PROFILES = {
    "": settings(max_examples=60, stateful_step_count=25, derandomize=True, database=None),
    "long": settings(max_examples=20_000, stateful_step_count=80, phases=set(Phase) - {Phase.explain}),
}
"""Profiles by the value of HEADWAY_HYPOTHESIS."""
RULES = st.builds(
    RunRules,
    max_lag=st.integers(0, 2),
    groups_per_step=st.integers(1, 2),
    ahead=st.sampled_from([None, None, 0, 0.5, 1]),
    on_straggler=st.sampled_from(["wait", "trim", "requeue"]),
    min_group_size=st.integers(1, 2),
    on_over_bound=st.sampled_from(["requeue", "drop", "mask"]),
    max_bytes=st.sampled_from([1 << 30, 3000]),
    max_leases_per_worker=st.sampled_from([0, 2]),
)


class Protocol(RuleBasedStateMachine):
    """One run. A rule that cannot apply does nothing."""

    url: ClassVar[str]
    run: ClassVar[str] = "protocol"

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.auditor = Auditor(self.url, self.run)
        self.auditor.redis.config_set("appendonly", "no")  # rollbacks are made by hand
        self.auditor.wipe()
        self.brokers: list[Broker] = []

    @initialize(
        rules=RULES,
        group_size=st.integers(1, 3),
        shards=st.sampled_from([1, 3]),
        keeps_log=st.booleans(),
        steps=st.integers(0, 3),
    )
    def begin(self, rules: RunRules, group_size: int, shards: int, keeps_log: bool, steps: int) -> None:
        self.model = Model(rules, group_size)
        self.audit = self.auditor.look()
        self.shards = shards
        self.log: dict[int, Batch] | None = {} if keeps_log else None
        self.checkpoints = [Checkpoint(0, 0, (), Cursor(PROMPTS))]
        self.learner: Learner | None = None
        self.zombies: list[Learner] = []
        self.saved: tuple[dict[bytes, tuple[int, bytes]], Samples] | None = None
        self.workers = [self._new_worker(i) for i in range(WORKERS)]
        self._start_learner(self.checkpoints[-1], resume=False)
        self.go_on(steps, 0, 1, False)

    # ---- usual work

    @rule(steps=st.integers(1, 3), which=SOME, left=st.integers(0, 2), saves=st.booleans())
    def go_on(self, steps: int, which: int, left: int, saves: bool) -> None:
        """Run learner and workers as usual; a worker leaves samples unfinished."""
        for _ in range(steps):
            if self.learner is None:
                self.resume(0, False)
            self._publish()
            self._feed(4)
            self.work(which, 6, left)
            self.work(which + 1, 4, 0)
            self._train()
            if saves:
                self._publish()
                self.checkpoint(False)

    @precondition(lambda self: self.learner)
    @rule(which=SOME, count=st.integers(1, 8), left=st.integers(0, 2))
    def work(self, which: int, count: int, left: int) -> None:
        """Run the worker's whole loop: newest weights, leases, submissions."""
        worker = self._worker(which)
        self.runner.run(worker.refresh())
        for flight in self._lease(worker, count)[left:]:
            worker.generate(flight, 2)
            self._submit(worker, flight)

    # ---- the learner

    @precondition(lambda self: self.learner)
    @rule(verb=st.sampled_from(["feed", "publish", "train"]), count=st.integers(0, 4))
    def learn(self, verb: str, count: int) -> None:
        match verb:
            case "feed":
                self._feed(count)
            case "publish":
                self._publish()
            case "train":
                self._publish()
                self._train()

    @rule(dies=st.booleans())
    def checkpoint(self, dies: bool) -> None:
        """Save a checkpoint; the learner may die once it is durable, before the broker knows."""
        if self.learner is None or self.learner.step == self.checkpoints[-1].step:
            return
        self.checkpoints.append(self._learn(lambda learner: learner.save()))
        if dies:
            self.learner = None
        else:
            self._learn(lambda learner: learner.commit(self.checkpoints[-1]))

    @rule(back=st.sampled_from([0, 0, 1, 2]), is_anew=st.booleans(), max_lag=st.sampled_from([None, None, 0, 1]))
    def resume(self, back: int, is_anew: bool, max_lag: int | None = None) -> None:
        """Resume from the last checkpoint, or from an earlier one on purpose, perhaps with another rule.

        A learner that still lives has lost the run.
        """
        at = max(len(self.checkpoints) - 1 - back, min(1, len(self.checkpoints) - 1))
        checkpoint = self.checkpoints[at]
        is_rewind = at < len(self.checkpoints) - 1
        if is_rewind and not is_anew and not self._log_reaches(checkpoint.step):
            return
        del self.checkpoints[at + 1 :]
        if max_lag is not None and not self.audit.batches:  # batches taken by another rule are trained again unchanged
            self.model.rules = msgspec.structs.replace(self.model.rules, max_lag=max_lag)
        self.model.is_calm &= max_lag is None and not is_rewind
        self._start_learner(checkpoint, resume=True, is_anew=is_rewind and is_anew)
        if is_rewind:
            self.checkpoints[at] = self._learn(lambda learner: learner.save())
            self._learn(lambda learner: learner.commit(self.checkpoints[at]))
        self._publish()

    @precondition(lambda self: self.zombies)
    @rule(which=SOME, verb=SOME)
    def act_as_a_fenced_learner(self, which: int, verb: int) -> None:
        zombie = self.zombies[which % len(self.zombies)]
        owner, broker = zombie.claim.owner, zombie.broker
        verbs: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: broker.batches.take(owner, zombie.step, 1),
            lambda: broker.batches.commit(owner, zombie.step + 1, [group_id(0)], group_id(PROMPTS)),
            lambda: broker.versions.announce(owner, manifest(owner.incarnation, zombie.step + 1)),
            lambda: broker.versions.offer(owner, manifest(owner.incarnation, zombie.step + 1)),
            lambda: broker.prompts.feed([prompt(PROMPTS + 1)], owner),
            lambda: broker.prompts.close_feed(owner),
            lambda: broker.status.set_state(owner, "finished"),
            lambda: broker.batches.reassert(owner, announced=None, committed_groups=[group_id(0)], pinned={}),
        ]
        with pytest.raises((FencedError, ServerRestartedError)):
            self.runner.run(verbs[verb % len(verbs)]())
        assert self.auditor.look() == self.audit

    # ---- workers

    @rule(which=SOME, count=st.integers(0, 4), is_fresh=st.booleans())
    def lease(self, which: int, count: int, is_fresh: bool) -> None:
        worker = self._worker(which)
        if is_fresh:
            self.runner.run(worker.refresh())
        self._lease(worker, count)

    @precondition(lambda self: self._flights())
    @rule(which=SOME, tokens=st.integers(1, 3))
    def append(self, which: int, tokens: int) -> None:
        worker, flight = self._flight(which)
        worker.generate(flight, tokens)
        self._append(worker, flight)

    @precondition(lambda self: self._flights())
    @rule(which=SOME, tokens=st.integers(1, 3))
    def submit(self, which: int, tokens: int) -> None:
        worker, flight = self._flight(which)
        worker.generate(flight, tokens)
        self._submit(worker, flight)

    @precondition(lambda self: any(worker.landed for worker in self.workers))
    @rule(which=SOME)
    def submit_again(self, which: int) -> None:
        """Submit again, as after a lost reply."""
        landed = [(worker, flight) for worker in self.workers for flight in worker.landed]
        self._submit(*landed[which % len(landed)])

    @precondition(lambda self: self._flights())
    @rule(which=SOME, is_released=st.booleans())
    def renew_or_release(self, which: int, is_released: bool) -> None:
        worker, flight = self._flight(which)
        if is_released:
            self._work(worker.release(flight))
            self.model.samples.release(flight.lease.tid, flight.lease.token)
        else:
            worker.flights = self._work(worker.renew())  # the worker gives up the rest

    @rule(which=SOME, is_durable=st.booleans())
    def confirm(self, which: int, is_durable: bool) -> None:
        worker, had = self._worker(which), self.audit
        if is_durable:
            self.saved = None  # the server's disk has caught up
        with patch.object(worker.broker._connection, "make_durable", return_value=is_durable):
            self._work(worker.broker.leases.confirm())
        for flight in worker.landed:
            if self._is_accepted(flight, self.audit) and not self._is_accepted(flight, had):
                self.model.samples.submit(flight.lease.tid, flight.lease.token, "accepted")

    # ---- the world

    @rule(which=SOME)
    def kill_a_worker(self, which: int) -> None:
        i = which % WORKERS
        self.workers[i] = self._new_worker(i)

    @precondition(lambda self: self.audit.queues["leases"])
    @rule(which=SOME)
    def expire_a_lease(self, which: int) -> None:
        held = sorted(self.audit.queues["leases"])
        self.auditor.redis.zadd(self.auditor.keys.hidden("leases"), {held[which % len(held)]: 0}, xx=True)
        self._look()

    @rule()
    def save_the_server(self) -> None:
        """Save the server: later writes have not reached its disk."""
        self.saved = self.auditor.save(), self.model.samples.copy()

    @precondition(lambda self: self.saved is not None)
    @rule(kills_the_learner=st.booleans())
    def roll_the_server_back(self, kills_the_learner: bool) -> None:
        assert self.saved is not None
        dump, samples = self.saved
        self.auditor.restore(dump)
        if kills_the_learner:
            self.learner = None
        self.model.samples = samples.copy()
        self.model.delivered = dict(self.learner.taken) if self.learner else {}
        self.model.has_forgotten = True
        self.model.is_exact, self.model.is_calm = self.log is not None, False
        self._restart_the_server()

    @precondition(lambda self: self.audit.blobs)
    @rule(which=SOME)
    def damage(self, which: int) -> None:
        """Overwrite a blob."""
        blobs = sorted(self.audit.blobs, key=_without_chance)
        name = blobs[which % len(blobs)]
        self.auditor.redis.setrange(self.auditor.blob(name), 20, b"\xff\xff\xff")
        self.model.damaged.add(name.split(":")[1])
        self.model.is_exact, self.model.is_calm = self.log is not None, False

    # ---- the end

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self._drain()
        finally:
            for broker in self.brokers:
                self.runner.run(broker.close())
            self.runner.close()
            self.auditor.close()

    def _drain(self) -> None:
        """Assert that one learner and one worker, undisturbed, train all remaining groups once."""
        if self.learner is None:
            self.resume(0, False)
        assert self.learner is not None
        worker = Worker(self._open(), "last", self.shards)
        self.workers.append(worker)
        for _ in range(PATIENCE):
            self._publish()
            self._feed(2)
            for i in range(len(self.audit.queues["leases"])):
                self.expire_a_lease(i)
            self.work(len(self.workers) - 1, 4, 0)
            self._train()
            if self.learner.is_exhausted:
                break
        else:
            waiting_for = self.learner.waits_for
            pytest.fail(f"after {PATIENCE} rounds the run is not at its end, but waits for {waiting_for}: {self.audit}")
        self.checkpoints.append(self._learn(lambda learner: learner.save()))
        self._learn(lambda learner: learner.commit(self.checkpoints[-1]))
        self._judge_end(self.learner)

    def _judge_end(self, learner: Learner) -> None:
        trained = groups_of(learner.lineage)
        assert len(set(trained)) == len(trained)
        missing = {group_id(i) for i in range(PROMPTS)} - set(trained)
        if self.model.rules.on_over_bound != "drop":
            assert not missing, f"lost: {missing}"
        assert missing <= learner.cursor.done, f"neither trained nor dropped by the rule: {missing}"
        assert not self.audit.groups, f"left over: {self.audit.groups}"
        assert self.audit.count("payload_bytes") == 0

    # ---- parts of the rules

    def _learn(self, verb: Callable[[Learner], Coroutine[Any, Any, T]]) -> T:
        """Run a verb of the learner, and judge its changes."""
        assert self.learner is not None
        step, told = self.learner.step, set(groups_of(self.learner.taken.values()))
        before, result = self.audit, self.runner.run(verb(self.learner))
        self._judge_learner(self.learner, before, step, told)
        return result

    def _judge_learner(self, learner: Learner, before: Audit, step: int, told: set[str]) -> None:
        self._look()
        done = {*groups_of(learner.lineage), *learner.cursor.done, *groups_of((learner.log or {}).values())}
        judge_learner(before, self.audit, self.model, step, told | set(groups_of(learner.taken.values())), done)

    def _work(self, verb: Coroutine[Any, Any, T]) -> T:
        """Run a verb of a worker, and judge its changes."""
        before, result = self.audit, self.runner.run(verb)
        self._look()
        judge_worker(before, self.audit, self.model)
        return result

    def _restart_the_server(self) -> None:
        """Restart the server, which comes back under another identity."""
        for broker in self.brokers:
            broker._connection.server_id = "another"
            submissions = broker.leases._submissions
            submissions._server_id = submissions._server_id and "another"
        self.zombies.clear()
        self._look()

    def _feed(self, count: int) -> None:
        self._learn(lambda learner: learner.feed(count))

    def _publish(self) -> None:
        if self.learner is not None and not self.learner.has_published:
            self._learn(lambda learner: learner.publish())

    def _train(self) -> None:
        self._learn(lambda learner: learner.train())

    def _look(self) -> None:
        self.audit = self.auditor.look()
        self.audit.check()
        if self.model.is_calm and self.model.rules.on_straggler == "wait":
            assert self.audit.count("requeued") == self.audit.count("dropped") == 0, "work is wasted for no reason"
        groups = self.audit.groups.items()
        stored = {TrajectoryId(name, group.round, i) for name, group in groups for i in group.of_samples("payload")}
        self.model.samples.keep({name: group.round for name, group in groups}, stored)

    def _start_learner(self, checkpoint: Checkpoint, *, resume: bool, is_anew: bool = False) -> None:
        if self.learner is not None:
            self.zombies.append(self.learner)
        before = self.audit
        self.learner = self.runner.run(
            Learner.start(self._open(), self.model, checkpoint, self.log, resume=resume, is_anew=is_anew)
        )
        self.saved = None  # a claim has long reached the disk when its learner has loaded its model
        self._judge_learner(self.learner, before, checkpoint.step, set(before.groups) if is_anew else set())

    def _log_reaches(self, step: int) -> bool:
        """Whether the log reaches beyond `step`, or has nothing after it, in which case all is generated anew."""
        reached = self.checkpoints[-1].step
        return self.log is None or step not in self.log or all(i in self.log for i in range(step, reached))

    def _open(self) -> Broker:
        self.brokers.append(Broker(self.url, self.run))
        return self.brokers[-1]

    def _new_worker(self, i: int) -> Worker:
        return Worker(self._open(), f"w{i}", self.shards)

    def _worker(self, which: int) -> Worker:
        return self.workers[which % len(self.workers)]

    def _flights(self) -> list[tuple[Worker, Flight]]:
        return [(worker, flight) for worker in self.workers for flight in worker.flights]

    def _flight(self, which: int) -> tuple[Worker, Flight]:
        flights = self._flights()
        return flights[which % len(flights)]

    def _lease(self, worker: Worker, count: int) -> list[Flight]:
        if worker.version is None:
            return []
        flights = self._work(worker.lease(count))
        for flight in flights:
            self._judge_lease(worker, flight)
        assert len(flights) <= min(count, self.model.rules.max_leases_per_worker or count)
        return flights

    def _judge_lease(self, worker: Worker, flight: Flight) -> None:
        lease, rules = flight.lease, self.model.rules
        assert worker.version is not None
        group, announced = self.audit.groups[lease.tid.group], self.audit.announced_step
        assert announced is not None
        assert worker.version.step >= announced - rules.max_lag, "leased to weights too old for the next step"
        due = (group.number("index") or 0) // rules.groups_per_step
        assert worker.version.step >= due - rules.max_lag, f"leased to weights too old for step {due}, when it is due"
        kept = self.model.samples.appended.get(lease.tid, 0)
        oldest = min((version.step for version in flight.versions), default=announced)
        assert len(lease.segments) in {kept, 0}
        if not flight.is_copy:
            self.model.samples.appended[lease.tid] = len(lease.segments)
        assert rules.on_over_bound == "mask" or announced - oldest <= rules.max_lag
        self.model.samples.lease(lease.tid, lease.token)

    def _append(self, worker: Worker, flight: Flight) -> None:
        tid, appended = flight.lease.tid, self.model.samples.appended
        may, is_next = self._is_held(flight), len(flight.ends) == appended.get(tid, 0)
        if flight.is_copy:
            is_wanted = self._is_wanted(flight)
            assert self._work(worker.append(flight)).outcome == ("appended" if is_wanted else "fenced"), f"{tid}"
            return
        reply = self._work(worker.append(flight))
        assert reply.outcome == ("fenced" if not may else "appended" if is_next else "out of order"), f"{tid}: {reply}"
        if may:
            appended[tid] = reply.expected

    def _submit(self, worker: Worker, flight: Flight) -> None:
        tid, token = flight.lease.tid, flight.lease.token
        may, again = self._is_held(flight), self.model.samples.accepted.get(tid) == token
        outcome = self._work(worker.submit(flight))
        assert outcome == ("accepted" if may else "duplicate" if again else "fenced"), f"{tid}: {outcome}"
        self.model.samples.submit(tid, token, outcome)

    def _is_held(self, flight: Flight) -> bool:
        """Whether the worker's sample is wanted: not once its lease went to another, was given back, or is void."""
        if not self._is_wanted(flight):
            return False
        is_void = any(self._is_abandoned(version.incarnation, version.step) for version in flight.versions)
        if flight.is_copy:
            oldest = min(version.step for version in flight.versions)
            return not (is_void or oldest < flight.copied_from or self._is_over_bound(oldest))
        return self.model.samples.holders.get(flight.lease.tid) == flight.lease.token and not is_void

    def _is_wanted(self, flight: Flight) -> bool:
        tid, group = flight.lease.tid, self.audit.groups.get(flight.lease.tid.group)
        if group is None or (group.round, group.state) != (tid.round, "open"):
            return False
        return tid.sample not in group.of_samples("payload")

    def _is_over_bound(self, oldest: int) -> bool:
        rules, announced = self.model.rules, self.audit.announced_step
        return announced is not None and rules.on_over_bound != "mask" and announced - oldest > rules.max_lag

    def _is_accepted(self, flight: Flight, audit: Audit) -> bool:
        tid, group = flight.lease.tid, audit.groups.get(flight.lease.tid.group)
        if group is None or group.round != tid.round or tid.sample not in group.of_samples("payload"):
            return False
        return group.of_samples("token").get(tid.sample) == flight.lease.token

    def _is_abandoned(self, incarnation: int, step: int) -> bool:
        return any(incarnation < int(fork) and step > int(to) for fork, to in self.audit.forks.items())


def _without_chance(blob: str) -> str:
    """Return a blob's name without its shard and nonce, so that the same choices choose the same blob."""
    return ":".join(blob.rpartition("/")[2].split(":")[:4])


def test_no_order_of_verbs_and_faults_breaks_the_contract(url: str) -> None:
    class Here(Protocol):
        pass

    Here.url = url
    profile = PROFILES[os.environ.get("HEADWAY_HYPOTHESIS", "")]
    run_state_machine_as_test(Here, settings=settings(profile, deadline=None, suppress_health_check=list(HealthCheck)))

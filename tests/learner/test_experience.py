"""The learner's side of the broker, against a real server that dies and forgets."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark, TakenBatch
from headway.broker.client.leases import SubmitOutcome
from headway.broker.errors import BrokerUnavailableError, FencedError, ServerRestartedError
from headway.broker.schema import Group, Lease, Prompt, RunRules, Trajectory, WeightVersion
from headway.broker.schema.status import Tallies
from headway.broker.schema.weights import Probe, WeightManifest
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import encode_trajectory
from headway.learner.config import ModelConfig, PromptsConfig, RandomModelConfig
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience import stream
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.experience.length_drift import DriftWatch, length_drift
from headway.learner.experience.log import ExperienceLog
from headway.learner.experience.log_files import tids_of
from headway.learner.experience.stream import Experience, WaitReason
from headway.learner.models.pretrained import load_tokenizer
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher
from headway.weightsync.tensors.fingerprint import fingerprint
from tests.broker.scenario import trajectory
from tests.deploy.runs import run_status
from tests.learner.batches import damage
from tests.processes import kill

GROUPS_PER_STEP, MAX_LAG = 4, 1
DEADLINE_S = 240.0
RULES = RunRules(max_lag=MAX_LAG, groups_per_step=GROUPS_PER_STEP)
PROBE = Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=0.1)
TOKENIZER = load_tokenizer(
    ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="0123456789+-*=,#^", config={}))
)


def after(polls: int) -> Callable[[], bool]:
    """Return a function that asks to stop once it was called so many times."""
    asked = iter(range(polls))
    return lambda: next(asked, None) is None


@contextmanager
def experience(
    url: str,
    checkpoint: CheckpointMark,
    should_stop: Callable[[], bool],
    epochs_of: Path | None = None,
    logged: Path = Path("/dev/null/nowhere"),  # where root cannot write either
    rules: RunRules = RULES,
    replacement_rounds: int = 0,
    masks_truncated: bool = False,
) -> Iterator[tuple[Experience, BlockingBroker]]:
    kind = {"kind": "jsonl", "path": str(epochs_of), "epochs": 1} if epochs_of else {"kind": "arithmetic"}
    prompts = open_prompts(PromptsConfig(**kind), TOKENIZER, seed=0)
    cursor = PromptCursor(prompts, num_samples=2, seed=0, epochs=1 if epochs_of else 0)
    blocking = BlockingBroker(url, "run", timeout_s=2.0)
    claim = blocking.call(
        blocking.broker.batches.claim(checkpoint=checkpoint, rules=rules, config=b"", resume=checkpoint.step > 0)
    )
    publisher = Publisher(blocking, claim.owner, WeightsConfig(broadcast_timeout_s=2.0))
    try:
        yield (
            Experience(
                blocking,
                claim,
                publisher,
                cursor,
                ExperienceLog(logged, 1 << 20),
                groups_per_step=GROUPS_PER_STEP,
                max_lag=MAX_LAG,
                should_stop=should_stop,
                replacement_rounds=replacement_rounds,
                masks_truncated=masks_truncated,
            ),
            blocking,
        )
    finally:
        publisher.close()
        blocking.close()


def begin_to_publish(learner: Experience, step: int) -> None:
    learner.publish(WeightVersion(learner.owner.incarnation, step), [("w", torch.full((4,), float(step)))], PROBE)


def publish(learner: Experience, step: int) -> None:
    begin_to_publish(learner, step)
    learner.settle()


def forget_everything(server: EmbeddedServer, directory: Path) -> None:
    kill(server)
    shutil.rmtree(directory / "appendonlydir")
    server.start()


def test_it_feeds_ahead_of_admission_and_ends_when_asked_to(url: str) -> None:
    with experience(url, CheckpointMark(0, 0), after(3)) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        assert blocking.call(blocking.broker.prompts.waiting())[0] == (MAX_LAG + 2) * GROUPS_PER_STEP


def announced(blocking: BlockingBroker) -> WeightVersion | None:
    return blocking.call(blocking.broker.versions.current())[1]


class Announcing:
    """The broker's verb, which the test delays or lets fail."""

    def __init__(self, blocking: BlockingBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._announce, self._announced = blocking.broker.versions.announce, blocking.broker.versions.announced
        self.goes_on = threading.Event()
        self.manifests: list[WeightManifest | None] = []
        self.failures: list[Exception] = []
        monkeypatch.setattr(blocking.broker.versions, "announce", self)
        self._monkeypatch = monkeypatch

    def goes_on_once_settled(self, learner: Experience) -> None:
        """Let the announcement go on only when the learner waits for it."""
        settle = learner.settle

        def settle_at_last() -> None:
            self.goes_on.set()
            settle()

        self._monkeypatch.setattr(learner, "settle", settle_at_last)

    async def __call__(self, *arguments: Any) -> None:
        await asyncio.to_thread(self.goes_on.wait, 60)
        if self.failures:
            raise self.failures.pop()
        await self._announce(*arguments)
        self.manifests.append(await self._announced())


def test_a_version_is_announced_beside_the_next_step(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later changes of the tensors do not change the announced version; the next version waits for the announcement."""
    with experience(url, CheckpointMark(0, 0), after(10_000)) as (learner, blocking):
        learner.feed()
        publish(learner, 0)
        announcing = Announcing(blocking, monkeypatch)
        tensor = torch.full((4,), 1.0)
        learner.publish(WeightVersion(1, 1), [("w", tensor)], PROBE)
        tensor.fill_(2.0)
        assert len(generate(blocking, 0, GROUPS_PER_STEP)) == GROUPS_PER_STEP
        assert len(take(learner, 1)) == GROUPS_PER_STEP
        assert announced(blocking) == WeightVersion(1, 0)
        announcing.goes_on.set()
        learner.publish(WeightVersion(1, 2), [("w", tensor)], PROBE)
        assert announcing.manifests
        learner.settle()
        assert announced(blocking) == WeightVersion(1, 2)
        fingerprints = [manifest.fingerprints for manifest in announcing.manifests if manifest]
        assert fingerprints == [(fingerprint(torch.full((4,), value)),) for value in (1.0, 2.0)]


def test_a_version_that_was_not_announced_is_announced_while_a_batch_is_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with experience(url, CheckpointMark(0, 0), after(200)) as (learner, blocking):
        announcing = Announcing(blocking, monkeypatch)
        announcing.failures = [BrokerUnavailableError("away"), ServerRestartedError("anew")]
        announcing.goes_on.set()
        begin_to_publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        assert announced(blocking) == WeightVersion(1, 0)


def test_a_learner_that_waits_for_a_batch_hears_that_it_is_superseded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with experience(url, CheckpointMark(0, 0), after(10_000)) as (learner, blocking):
        announcing = Announcing(blocking, monkeypatch)
        announcing.failures = [FencedError("another learner has the run")]
        begin_to_publish(learner, 0)
        announcing.goes_on.set()
        with pytest.raises(FencedError, match="another learner"):
            learner.take(0)


def test_a_server_that_is_restarted_during_a_replay_makes_nobody_publish_twice(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server kept all steps that are replayed, and had nothing of the step that the learner asks for afterwards."""
    batch = train_two_steps(server.url, tmp_path / "log")
    with experience(server.url, CheckpointMark(1, 1), after(200), logged=tmp_path / "log") as (resumed, blocking):
        kill(server)
        server.start()
        assert tids_of(take(resumed, 1)) == tids_of(batch)
        announcing = Announcing(blocking, monkeypatch)
        begin_to_publish(resumed, 2)
        announcing.goes_on.set()
        with pytest.raises(StopRequested):  # no WaitReason.FOR_WEIGHTS: the loop would publish this version again
            resumed.take(2)
        assert announced(blocking) == WeightVersion(2, 2)


def test_a_full_store_waits_for_a_commit(url: str) -> None:
    rules = RunRules(max_lag=MAX_LAG, groups_per_step=GROUPS_PER_STEP, max_bytes=1)
    with experience(url, CheckpointMark(0, 0), after(10_000), rules=rules) as (learner, blocking):
        learner.feed()
        publish(learner, 0)
        assert len(generate(blocking, 0, GROUPS_PER_STEP)) == GROUPS_PER_STEP
        take(learner, 0)
        publish(learner, 1)
        assert learner.take(1) is WaitReason.FOR_COMMIT


def test_a_learner_that_waits_long_tells_the_other_ranks_that_it_lives(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PATIENCE_S", 0.0)
    with experience(url, CheckpointMark(0, 0), after(10_000)) as (learner, _):
        publish(learner, 0)
        assert learner.take(0) is WaitReason.FOR_RANKS


def test_engines_get_the_device_only_once_they_can_have_the_weights(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with experience(url, CheckpointMark(0, 0), after(10_000)) as (learner, blocking):
        announcing = Announcing(blocking, monkeypatch)
        begin_to_publish(learner, 0)
        announcing.goes_on_once_settled(learner)
        assert learner.take(0, may_wait=False) is WaitReason.FOR_DEVICE
        assert announced(blocking) == WeightVersion(1, 0)


def test_a_server_that_forgot_what_is_replayed_makes_us_publish(server: EmbeddedServer, tmp_path: Path) -> None:
    with experience(server.url, CheckpointMark(0, 0), after(1)) as (first, _):
        publish(first, 3)
    with experience(server.url, CheckpointMark(1, 1), after(10_000)) as (resumed, blocking):
        assert announced(blocking) == WeightVersion(1, 3)
        forget_everything(server, tmp_path / "server")
        assert resumed.take(1) is WaitReason.FOR_WEIGHTS
        publish(resumed, 1)  # the loop does the same then
        assert announced(blocking) == WeightVersion(2, 1)


def test_a_restarted_server_is_told_the_newest_version_and_fed_again(server: EmbeddedServer, tmp_path: Path) -> None:
    with experience(server.url, CheckpointMark(0, 0), after(4)) as (learner, blocking):
        publish(learner, 2)
        with pytest.raises(StopRequested):
            learner.take(2)
        forget_everything(server, tmp_path / "server")
        publish(learner, 3)
        assert announced(blocking) == WeightVersion(1, 3)
        with pytest.raises(StopRequested):
            learner.take(3)
        assert blocking.call(blocking.broker.prompts.waiting())[0] >= MAX_LAG * GROUPS_PER_STEP


def test_a_finite_feed_is_closed_so_that_it_can_be_exhausted(url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "ground_truth": "2", "data_source": "a"}\n' * 3)
    with experience(url, CheckpointMark(0, 0), after(1), rows) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        assert blocking.call(blocking.broker.status.snapshot()).queues.pool == 3


def test_a_stopping_learner_does_not_wait_for_a_dead_server(server: EmbeddedServer) -> None:
    with experience(server.url, CheckpointMark(0, 0), lambda: True) as (learner, _):
        server.stop()
        learner.commit(1)
        learner.set_state("stopped")
        assert learner.status() is None
        with pytest.raises(StopRequested):
            learner.take(1)


def generate(
    blocking: BlockingBroker, step: int, groups: int, sampled: Callable[[Lease, int], Trajectory] = trajectory
) -> list[str]:
    """Finish so many groups of two samples as a worker with the weights of `step`, and return their names."""
    version = WeightVersion(1, step)
    leases = blocking.call(blocking.broker.leases.lease("w", version, 2 * groups, 30.0)).leases
    for lease in leases:
        assert blocking.call(blocking.broker.leases.submit(lease, sampled(lease, step))) is SubmitOutcome.ACCEPTED
    return sorted({lease.tid.group for lease in leases})


def take(learner: Experience, step: int) -> list[Group]:
    taken = learner.take(step)
    assert isinstance(taken, TakenBatch)
    return list(taken.groups)


def train_two_steps(url: str, logged: Path) -> list[Group]:
    """Return the batch of step 1, which a learner took that announced step 2 and is gone afterwards."""
    with experience(url, CheckpointMark(0, 0), after(1), logged=logged) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        assert len(generate(blocking, 0, 2 * GROUPS_PER_STEP)) == 2 * GROUPS_PER_STEP
        take(learner, 0)
        batch = take(learner, 1)
        publish(learner, 2)
        return batch


def test_a_batch_that_the_server_forgot_is_trained_from_the_log(server: EmbeddedServer, tmp_path: Path) -> None:
    batch = train_two_steps(server.url, tmp_path / "log")
    with experience(server.url, CheckpointMark(1, 1), after(3), logged=tmp_path / "log") as (resumed, blocking):
        forget_everything(server, tmp_path / "server")
        assert tids_of(take(resumed, 1)) == tids_of(batch)
        pinned = blocking.call(
            blocking.broker._connection.execute("LRANGE", blocking.broker._connection.keys.hidden("batch:1"), 0, -1)
        )
        assert [name.decode() for name in pinned] == [group.prompt.group for group in batch]
        assert resumed.take(2) is WaitReason.FOR_WEIGHTS  # the log ends here
        publish(resumed, 2)
        free = blocking.call(blocking.broker.leases.lease("w", WeightVersion(2, 2), 100, 30.0)).leases
        assert free
        assert {lease.tid.group for lease in free}.isdisjoint(tid.group for tid in tids_of(batch))


def test_a_batch_of_which_the_server_lost_a_part_is_trained_whole(url: str, tmp_path: Path) -> None:
    batch = train_two_steps(url, tmp_path)
    with experience(url, CheckpointMark(1, 1), after(100), logged=tmp_path) as (resumed, blocking):
        group = batch[2].prompt.group
        (name, *_) = blocking.call(blocking.broker._connection.scan(blocking_key(blocking, f"payload:{group}:*")))
        blocking.call(blocking.broker._connection.execute("UNLINK", name))
        assert tids_of(take(resumed, 1)) == tids_of(batch)
        assert blocking.call(blocking.broker.status.snapshot()).queues.retry == 0  # no worker generates it again


def test_a_sample_that_the_server_has_otherwise_than_it_was_trained_is_trained_as_it_was(
    url: str, tmp_path: Path
) -> None:
    """A server that lost its last seconds holds a sample that had been replaced then, under the same name."""
    batch = train_two_steps(url, tmp_path)
    with experience(url, CheckpointMark(1, 1), after(100), logged=tmp_path) as (resumed, blocking):
        trained = batch[2].trajectories[0]
        (name,) = blocking.call(blocking.broker._connection.scan(blocking_key(blocking, f"payload:{trained.tid}:*")))
        other = encode_trajectory(replace(trained, reward=trained.reward + 1))
        blocking.call(blocking.broker._connection.execute("SET", name, other))
        rewards = {one.tid: one.reward for group in take(resumed, 1) for one in group.trajectories}
        assert rewards == {one.tid: one.reward for group in batch for one in group.trajectories}


def test_without_a_log_what_is_lost_is_a_rewind(server: EmbeddedServer, tmp_path: Path) -> None:
    train_two_steps(server.url, tmp_path / "log")
    damage(tmp_path / "log", 1)
    with experience(server.url, CheckpointMark(1, 1), after(3), logged=tmp_path / "log") as (resumed, _):
        forget_everything(server, tmp_path / "server")
        assert resumed.take(1) is WaitReason.FOR_WEIGHTS


def test_groups_that_were_dropped_do_not_hold_the_watermark_back(url: str) -> None:
    rules = RunRules(max_lag=MAX_LAG, groups_per_step=GROUPS_PER_STEP, on_over_bound="drop")
    with experience(url, CheckpointMark(0, 0), after(1), rules=rules) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        assert len(generate(blocking, 0, 2 * GROUPS_PER_STEP)) == 2 * GROUPS_PER_STEP
        trained = [group.prompt.group for group in take(learner, 0)]
        publish(learner, MAX_LAG + 1)
        with pytest.raises(StopRequested):
            learner.take(MAX_LAG + 1)  # the other groups are too old for this step
        learner._cursor.mark_trained(trained)
        assert learner._cursor.watermark == f"0000-{GROUPS_PER_STEP:08d}"
        learner.mark_dropped()
        assert learner._cursor.state() == {"epoch": 0, "position": 2 * GROUPS_PER_STEP, "trained": []}


def test_groups_that_teach_nothing_are_replaced_so_often_and_no_more(url: str, tmp_path: Path) -> None:
    with experience(url, CheckpointMark(0, 0), after(1), logged=tmp_path, replacement_rounds=1) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        names = generate(blocking, 0, 3 * GROUPS_PER_STEP)  # all of them with the same reward
        learner._should_stop = after(3)
        taken = [group.prompt.group for group in take(learner, 0)]
        assert taken == names[GROUPS_PER_STEP : 2 * GROUPS_PER_STEP]
        status = learner.status()
        assert status is not None
        assert status.queues.uninformative == GROUPS_PER_STEP


@pytest.mark.parametrize("masks_truncated", [True, False])
def test_groups_without_a_sample_that_may_be_trained_are_replaced(
    masks_truncated: bool, url: str, tmp_path: Path
) -> None:
    def sampled(lease: Lease, step: int) -> Trajectory:
        """Truncate both samples of the first two groups and one of the third; both rewards of a group differ."""
        group, sample = int(lease.tid.group[-1]), lease.tid.sample
        reason = "length" if group < 2 or (group == 2 and sample == 0) else "stop"
        return replace(trajectory(lease, step), reward=float(sample), finish_reason=reason)

    with experience(
        url, CheckpointMark(0, 0), after(1), logged=tmp_path, replacement_rounds=1, masks_truncated=masks_truncated
    ) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        names = generate(blocking, 0, 2 * GROUPS_PER_STEP, sampled)
        learner._should_stop = after(3)
        first = 2 if masks_truncated else 0
        assert [group.prompt.group for group in take(learner, 0)] == names[first : first + GROUPS_PER_STEP]


def test_what_is_replayed_is_not_replaced(url: str, tmp_path: Path) -> None:
    with experience(url, CheckpointMark(0, 0), after(1)) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        generate(blocking, 0, 3 * GROUPS_PER_STEP)
        take(learner, 0)
        publish(learner, 1)
        before = [group.prompt.group for group in take(learner, 1)]
        publish(learner, 2)
    with experience(url, CheckpointMark(1, 1), after(3), replacement_rounds=9) as (resumed, _):
        assert [group.prompt.group for group in take(resumed, 1)] == before


def test_a_prompt_that_the_server_lost_is_fed_again(url: str) -> None:
    with experience(url, CheckpointMark(0, 0), after(2)) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        lost = "0000-00000001"
        damage_prompt(blocking, lost)
        assert lost not in generate(blocking, 0, 2)
        assert blocking.call(blocking.broker.prompts.waiting())[1]
        with pytest.raises(StopRequested):
            learner.take(0)
        assert not blocking.call(blocking.broker.prompts.waiting())[1]
        assert lost in generate(blocking, 0, 2)


def test_a_prompt_that_is_lost_as_soon_as_it_was_fed_again_is_fed_once_more(url: str) -> None:
    with experience(url, CheckpointMark(0, 0), after(1)) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(StopRequested):
            learner.take(0)
        lost = "0000-00000000"
        for _ in range(2):
            damage_prompt(blocking, lost)
            assert lost not in generate(blocking, 0, 1)
            assert blocking.call(blocking.broker.prompts.waiting())[1]
            learner.feed()
        assert not blocking.call(blocking.broker.prompts.waiting())[1]
        assert lost in generate(blocking, 0, 1)


def damage_prompt(blocking: BlockingBroker, group: str) -> None:
    connection = blocking.broker._connection
    blocking.call(connection.execute("SET", connection.keys.prompt(group), b"junk"))


def blocking_key(blocking: BlockingBroker, name: str) -> str:
    return blocking.broker._connection.keys(name)


def test_drift_is_the_distance_that_what_is_in_flight_cannot_explain() -> None:
    assert length_drift({}, {}, 0) == 0
    assert length_drift({8: 30, 16: 10}, {8: 300, 16: 100}, 0) == 0
    assert length_drift({8: 50, 16: 50}, {8: 50}, 0) == pytest.approx(0.5)
    assert length_drift({8: 50, 16: 50}, {8: 50}, 50) == 0  # the long ones may be on their way
    assert length_drift({8: 50, 16: 50}, {8: 50}, 20) == pytest.approx(0.3)


def test_a_drift_is_said_once_and_again_when_it_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    watch = DriftWatch()
    status = run_status()
    for long, said in ((5, 0), (60, 1), (60, 1), (61, 1), (90, 2)):
        dispatched = {16: 1000 - 10 * long, 512: 10 * long}
        tallies = Tallies(dispatched_by_prompt_length=dispatched, trained_by_prompt_length={16: 256})
        watch.check(msgspec.structs.replace(status, tallies=tallies))
        assert caplog.text.count("differ in length") == said
    few = Tallies(dispatched_by_prompt_length={512: 1000}, trained_by_prompt_length={16: 255})
    DriftWatch().check(msgspec.structs.replace(status, tallies=few))
    assert caplog.text.count("differ in length") == 2


def test_prompts_that_an_outage_swallowed_are_fed_once_it_is_over(server: EmbeddedServer, tmp_path: Path) -> None:
    with experience(server.url, CheckpointMark(0, 0), after(1)) as (learner, blocking):
        publish(learner, 0)
        own = learner._feed
        own._prompts, real = Unreachable(own._prompts), own._prompts  # type: ignore[assignment]
        with pytest.raises(BrokerUnavailableError):
            own.keep_ahead()
        own._prompts = real
        own.keep_ahead()
        wanted = (MAX_LAG + 2) * GROUPS_PER_STEP
        first = blocking.call(
            blocking.broker._connection.execute("ZRANGE", blocking.broker._connection.keys.hidden("pool"), 0, 0)
        )
        assert blocking.call(blocking.broker.prompts.waiting())[0] == wanted
        assert first == [b"0000-00000000"]


def test_a_slow_source_holds_up_no_other_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with experience(url, CheckpointMark(0, 0), after(1)) as (learner, blocking):
        cursor = learner._feed._cursor
        states: list[str] = []

        def slow(count: int) -> list[Prompt]:
            asked = asyncio.run_coroutine_threadsafe(blocking.broker.status.state(), blocking._loop)
            states.append(asked.result(timeout=DEADLINE_S))  # another thread's call is answered while the source works
            return drawn(count)

        drawn, cursor.next = cursor.next, slow  # type: ignore[method-assign]
        monkeypatch.setattr(stream, "DRAW_S", 0.0)
        for fed in (1, 2):  # the prompts drawn so far are fed before the rest
            learner.feed()
            assert blocking.call(blocking.broker.prompts.waiting())[0] == fed
        monkeypatch.setattr(stream, "DRAW_S", DEADLINE_S)
        learner.feed()
        assert len(states) == blocking.call(blocking.broker.prompts.waiting())[0] == (MAX_LAG + 2) * GROUPS_PER_STEP
        assert set(states) == {"claimed"}


class Unreachable:
    """A feed whose server goes away between two of its calls."""

    def __init__(self, prompts: object) -> None:
        self.waiting = prompts.waiting  # type: ignore[attr-defined]

    async def feed(self, *_: object) -> int:
        raise BrokerUnavailableError("gone")

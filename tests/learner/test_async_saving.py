"""A checkpoint written beside training holds its own step's state; the broker hears of it once it is durable."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headway.broker.client.learner import CheckpointMark, TakenBatch
from headway.broker.schema import WeightVersion
from headway.learner.backends.base import Snapshot
from headway.learner.checkpoint import CheckpointError, CheckpointStore, LearnerState
from headway.learner.experience.stream import WaitReason
from headway.learner.ranks import Ranks
from headway.learner.stages.loop import Learner, LoopConfig
from headway.learner.stages.stage_checkpoints import CheckpointWriter
from tests.learner import async_saving_rank
from tests.learner.async_saving_rank import Held, open_tiny, tensors
from tests.learner.test_checkpoint import everything, seed_everything, train
from tests.learner.test_checkpoint import open_tiny as open_fsdp
from tests.learner.test_experience import after, experience
from tests.learner.torchrun import run_ranks

EVERY = 2


def test_what_is_written_is_the_snapshot(tmp_path: Path) -> None:
    seed_everything()
    backend = open_fsdp(5)
    train(backend, range(2))
    held, store = Held(backend), CheckpointStore(tmp_path, keep=2)
    writer = CheckpointWriter(store, Ranks.of(backend), asynchronous=True)
    writer.begin({"": held}, LearnerState(incarnation=1, step=2))
    train(backend, range(2))
    uninterrupted = everything(backend)
    assert writer.poll() is None
    held.gate.set()
    assert writer.wait() == 2
    resumed = open_fsdp(99)
    resumed.load(store.path(1, 2))
    train(resumed, range(2))
    for got, expected in zip(everything(resumed), uninterrupted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_two_ranks_save_while_they_train(tmp_path: Path) -> None:
    run_ranks(async_saving_rank.__name__, 2, tmp_path, "fsdp", "megatron")
    alone = open_tiny("fsdp", 7)
    alone.load(tmp_path / "fsdp" / "checkpoints" / "1" / "step_2")
    expected = load_file(tmp_path / "fsdp" / "two.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(alone).items())


@dataclass
class Story:
    """A learner of 64 bytes without a model, and the events of its training in order."""

    directory: Path
    stop_at: int = 99
    asks_for_bytes_at: int = 99
    write: Callable[[int], object] = lambda step: None
    events: list[tuple[str, int]] = field(default_factory=list)
    under_way: WeightVersion | None = None

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.directory, keep=9)
        self.learner = Learner(
            backend=self,  # type: ignore[arg-type]
            ranks=Ranks(0, 1, 0, 1, True),
            updater=SimpleNamespace(  # type: ignore[arg-type]
                extra_models={},
                compute_advantages=self.compute_advantages,
                pack=lambda sequences: sequences,
                update=self.update,
            ),
            experience=self,  # type: ignore[arg-type]
            cursor=SimpleNamespace(state=dict, mark_trained=list),  # type: ignore[arg-type]
            checkpoints=self.store,
            config=LoopConfig(steps=5, checkpoint_every=EVERY, probe_tokens=(1, 2), probe_tolerance=1.0),
            observer=SimpleNamespace(on_weights=self.ignore, on_publish=self.ignore, on_step=self.ignore),
            should_stop=lambda: self.learner.version.step >= self.stop_at,
            version=WeightVersion(1, 0),
        )

    def ignore(self, *_: object, **__: object) -> None:
        pass

    feed = mark_dropped = ignore

    def publish(self, version: WeightVersion, *_: object) -> None:
        self.under_way = version

    def settle(self) -> None:
        self.under_way = None

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        assert is_copied
        assert self.under_way is None  # the checkpoint's contents have been announced
        step = self.learner.version.step
        self.events.append(("copied", step))

        def write() -> None:
            self.write(step)
            (directory / "weights").write_bytes(bytes(64))

        return Snapshot((write,))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def logprobs(self, batches: Sequence[Any], temperature: float) -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in batches]

    def compute_advantages(self, groups: object, step: int) -> Any:
        return SimpleNamespace(sequences=())

    def update(self, sequences: object, step: int, **_: object) -> Any:
        self.events.append(("trained", step))
        return SimpleNamespace(loss=0.0)

    def take(self, step: int, meanwhile: object = None, *, may_wait: bool = True) -> TakenBatch | WaitReason:
        if step == self.asks_for_bytes_at:
            self.asks_for_bytes_at = 99
            return WaitReason.FOR_COMMIT
        group: Any = SimpleNamespace(prompt=SimpleNamespace(group="0-0"), trajectories=())
        return TakenBatch(step, (group,))

    def commit(self, step: int) -> None:
        latest = self.store.latest()
        assert latest is not None
        assert latest.state.step >= step, "committed before it was durable"
        self.events.append(("committed", step))

    def happened(self, what: str) -> list[int]:
        return [step for name, step in self.events if name == what]


def test_training_goes_on_and_the_commit_waits(tmp_path: Path) -> None:
    story, is_trained = Story(tmp_path), threading.Event()
    story.write = lambda step: _must(is_trained.wait(240))
    update = story.update

    def update_and_tell(packed: object, step: int, **named: object) -> Any:
        updated = update(packed, step, **named)
        if step == EVERY:  # the checkpoint before it is still being written
            assert story.happened("committed") == []
            is_trained.set()
        return updated

    story.learner.updater.update = update_and_tell  # type: ignore[method-assign]
    assert story.learner.run()
    assert story.happened("copied") == story.happened("committed") == [2, 4, 5]
    assert [event for event in story.events if event[0] != "trained"] == [
        (what, step) for step in (2, 4, 5) for what in ("copied", "committed")
    ], "one at a time"


def _must(claim: bool) -> None:
    assert claim


def slowly(step: int) -> None:
    time.sleep(0.2)


def test_an_orderly_stop_waits_for_its_checkpoint(tmp_path: Path) -> None:
    story = Story(tmp_path, stop_at=3, write=slowly)
    assert not story.learner.run()
    assert story.happened("trained") == [0, 1, 2]
    assert story.events[-1] == ("committed", 3)


def test_an_early_checkpoint_is_durable_before_more_is_asked_for(tmp_path: Path) -> None:
    story = Story(tmp_path, asks_for_bytes_at=3, write=slowly)
    assert story.learner.run()
    assert story.events.index(("committed", 3)) < story.events.index(("trained", 3))


def test_a_failed_write_stops_the_run_and_leaves_what_was_there(tmp_path: Path) -> None:
    story = Story(tmp_path)

    def fail_later(step: int) -> None:
        if step == 2 * EVERY:
            raise OSError("No space left on device")

    story.write = fail_later
    with pytest.raises(CheckpointError, match=r"No space left on device .*Older checkpoints are untouched"):
        story.learner.run()
    assert story.happened("committed") == [2]
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["step_2"]


def test_a_directory_that_was_removed_is_no_full_disk(tmp_path: Path) -> None:
    story = Story(tmp_path / "run" / "checkpoints", write=lambda step: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(CheckpointError) as caught:
        story.learner.run()
    assert f"{tmp_path / 'run' / 'checkpoints'} is gone" in str(caught.value)
    assert "Make room" not in str(caught.value)


def test_a_bug_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    story = Story(tmp_path, write=lambda step: [][step])
    with pytest.raises(IndexError):
        story.learner.run()


def test_the_broker_forgets_no_more_than_the_checkpoint_contains(url: str) -> None:
    with experience(url, CheckpointMark(0, 0), after(9)) as (learner, blocking):
        learner.mark_dropped()
        learner._cursor.mark_trained([learner._cursor.watermark])  # trained while the checkpoint is written
        learner.commit(1)
        known = blocking.broker.batches._known
        assert known is not None
        assert known.watermark < learner._cursor.watermark


def test_every_rank_does_what_rank_0_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a broker hears each reason for waiting from rank 0, and then that there is nothing to wait for."""
    learner = Story(tmp_path).learner
    said = [
        *(
            wait.encode()
            for wait in (WaitReason.FOR_RANKS, WaitReason.FOR_COMMIT, WaitReason.FOR_RANKS, WaitReason.FOR_WEIGHTS)
        ),
        b"",
    ]
    no_groups = msgspec.msgpack.encode([])
    heard, done = iter([*said, no_groups]), list[str]()
    learner.experience = None
    learner.ranks = SimpleNamespace(world_size=2, share_bytes=lambda _: next(heard))  # type: ignore[assignment]
    monkeypatch.setattr(learner, "commit", lambda: done.append("commit"))
    monkeypatch.setattr(learner, "publish", lambda: done.append("publish"))
    monkeypatch.setattr(learner, "commit_durable", lambda step: done.append("look"))
    assert learner.take() == []
    assert done == ["look", "commit", "look", "publish"]
    assert next(heard, None) is None

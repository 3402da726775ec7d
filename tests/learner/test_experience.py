"""The learner's side of the broker, against a real server that dies and forgets."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from broker import BlockingBroker
from broker.batches import CheckpointMark
from broker.schema import Probe, RunRules, WeightVersion
from broker.server import EmbeddedServer
from learner.config import ModelConfig, PromptsConfig, RandomModelConfig
from learner.experience import Experience, Interrupted, NeedsLearner
from learner.model import load_tokenizer
from learner.prompts import open_prompts
from learner.prompts.cursor import PromptCursor
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher

GROUPS_PER_STEP, MAX_LAG = 4, 1
RULES = RunRules(max_lag=MAX_LAG, groups_per_step=GROUPS_PER_STEP)
PROBE = Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=0.1)
TOKENIZER = load_tokenizer(
    ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="0123456789+-*=,#^", config={}))
)


def after(polls: int) -> Callable[[], bool]:
    """Asked so many times, it stops."""
    asked = iter(range(polls))
    return lambda: next(asked, None) is None


@contextmanager
def experience(
    url: str, checkpoint: CheckpointMark, should_stop: Callable[[], bool], epochs_of: Path | None = None
) -> Iterator[tuple[Experience, BlockingBroker]]:
    kind = {"kind": "jsonl", "path": str(epochs_of), "epochs": 1} if epochs_of else {"kind": "arithmetic"}
    prompts = open_prompts(PromptsConfig(**kind), TOKENIZER, seed=0)  # type: ignore[arg-type]
    cursor = PromptCursor(prompts, num_samples=2, seed=0, epochs=1 if epochs_of else 0)
    blocking = BlockingBroker(url, "run", timeout_s=2.0)
    claim = blocking.call(
        blocking.broker.batches.claim(checkpoint=checkpoint, rules=RULES, config=b"", resume=checkpoint.step > 0)
    )
    publisher = Publisher(blocking, claim.owner, WeightsConfig(broadcast_timeout_s=2.0))
    try:
        yield (
            Experience(
                blocking,
                claim,
                publisher,
                cursor,
                groups_per_step=GROUPS_PER_STEP,
                max_lag=MAX_LAG,
                should_stop=should_stop,
            ),
            blocking,
        )
    finally:
        publisher.close()
        blocking.close()


def publish(learner: Experience, step: int) -> None:
    learner.publish(WeightVersion(learner.owner.incarnation, step), [("w", torch.full((4,), float(step)))], PROBE)


def forget_everything(server: EmbeddedServer, directory: Path) -> None:
    os.kill(server.pid, signal.SIGKILL)
    while server.is_alive():
        pass
    shutil.rmtree(directory / "appendonlydir")
    server.start()


def test_it_feeds_ahead_of_admission_and_ends_when_asked_to(url: str) -> None:
    with experience(url, CheckpointMark(0, 0), after(3)) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(Interrupted):
            learner.take(0)
        assert blocking.call(blocking.broker.prompts.fed_ahead()) == (MAX_LAG + 2) * GROUPS_PER_STEP


def test_a_server_that_forgot_what_is_replayed_makes_us_publish(server: EmbeddedServer, tmp_path: Path) -> None:
    with experience(server.url, CheckpointMark(0, 0), after(1)) as (first, _):
        publish(first, 3)
    with experience(server.url, CheckpointMark(1, 1), after(10_000)) as (resumed, blocking):
        assert blocking.call(blocking.broker.versions.current())[1] == WeightVersion(1, 3)
        forget_everything(server, tmp_path / "server")
        with pytest.raises(NeedsLearner) as need:
            resumed.take(1)
        assert need.value.what == "rewind"
        publish(resumed, 1)  # what the loop does then
        assert blocking.call(blocking.broker.versions.current())[1] == WeightVersion(2, 1)


def test_a_restarted_server_is_told_the_newest_version_and_fed_again(server: EmbeddedServer, tmp_path: Path) -> None:
    with experience(server.url, CheckpointMark(0, 0), after(4)) as (learner, blocking):
        publish(learner, 2)
        with pytest.raises(Interrupted):
            learner.take(2)
        forget_everything(server, tmp_path / "server")
        publish(learner, 3)
        assert blocking.call(blocking.broker.versions.current())[1] == WeightVersion(1, 3)
        with pytest.raises(Interrupted):
            learner.take(3)
        assert blocking.call(blocking.broker.prompts.fed_ahead()) >= MAX_LAG * GROUPS_PER_STEP


def test_a_finite_feed_is_closed_so_that_it_can_be_exhausted(url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "ground_truth": "2", "data_source": "a"}\n' * 3)
    with experience(url, CheckpointMark(0, 0), after(1), rows) as (learner, blocking):
        publish(learner, 0)
        with pytest.raises(Interrupted):
            learner.take(0)
        assert blocking.call(blocking.broker.status.snapshot()).queues.pool == 3


def test_a_stopping_learner_does_not_wait_for_a_dead_server(server: EmbeddedServer) -> None:
    with experience(server.url, CheckpointMark(0, 0), lambda: True) as (learner, _):
        server.stop()
        learner.commit(1)
        learner.set_state("stopped")
        assert learner.status() is None
        with pytest.raises(Interrupted):
            learner.take(1)

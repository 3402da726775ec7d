"""The benchmarks of engine against learner, and of worker against engine, measure the quantities that they name."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import agreement
from benchmarks.throughput import checkpoint
from benchmarks.throughput.shapes import SHAPES
from benchmarks.worker_overhead.learner import StandInLearner
from benchmarks.worker_overhead.workload import rate
from headway.broker.client.broker import open_broker
from headway.broker.schema import Lease, Trajectory, VersionSpan, WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.batching.packing import PackableSequence


def test_engine_and_learner_agree_and_replay_takes_what_the_engine_chose(tmp_path: Path) -> None:
    shape = SHAPES["toy-moe"]
    directory = checkpoint.folder(tmp_path, "wide", shape)
    checkpoint.write(shape, directory, "cpu", agreement.SCALE)
    order = agreement.Order(
        kind="embedded",
        model=str(directory),
        has_experts=True,
        samples=str(tmp_path / "samples"),
        device="cpu",
        prompts=6,
        tokens=40,
    )
    assert agreement.sample(msgspec.to_builtins(order)) == {"tokens": 240}
    figures = agreement.compare(msgspec.to_builtins(msgspec.structs.replace(order, kind="fsdp")))
    assert figures["replay"]["tokens"] == figures["plain"]["tokens"] == 240
    assert 0 < figures["own_choices_differ"] < 0.05
    assert figures["replay"]["difference"]["max"] < 0.03
    # How much closer replay brings them is the processor's rounding; with other choices they are far apart.
    send_elsewhere(Path(order.samples), shape.experts)
    other = agreement.compare(msgspec.to_builtins(msgspec.structs.replace(order, kind="fsdp")))
    assert other["own_choices_differ"] > 0.5
    assert other["replay"]["difference"]["mean"] > 10 * figures["replay"]["difference"]["mean"]
    assert other["plain"]["difference"] == figures["plain"]["difference"]


def send_elsewhere(samples: Path, experts: int) -> None:
    """Send every token to the next experts."""
    frames = [decode_trajectory(frame) for frame in msgspec.msgpack.decode(samples.read_bytes(), type=list[bytes])]
    chosen = [one.experts for one in frames if one.experts is not None]
    moved = [
        msgspec.structs.replace(one, experts=(rows + 1) % experts) for one, rows in zip(frames, chosen, strict=True)
    ]
    samples.write_bytes(msgspec.msgpack.encode([encode_trajectory(one) for one in moved]))


def test_differences_are_of_tokens_and_ratios_of_responses() -> None:
    def response(*behavior: float) -> PackableSequence:
        size = len(behavior)
        return PackableSequence(
            token_ids=np.zeros(size + 2, np.int32),
            prompt_length=2,
            loss_mask=np.ones(size, np.uint8),
            behavior_logprobs=np.array(behavior, np.float32),
            lags=np.zeros(size, np.int64),
            advantages=np.zeros(size, np.float32),
        )

    found = agreement.differences([response(-1, -2), response(-4)], [np.array([-1.5, -1.0]), np.array([-4.0])])
    assert found["difference"] == {"mean": 0.5, "p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    assert found["sequence_ratio"]["max"] == pytest.approx(np.exp(0.5), rel=1e-3)
    assert (found["sequence_ratio"]["min"], found["tokens"]) == (1.0, 3)


def test_a_rate_is_that_between_the_first_and_the_last_look() -> None:
    found = rate([(10.0, 1000.0, 5.0), (11.0, 1400.0, 5.5), (14.0, 3000.0, 6.0)])
    assert found == {"tokens_per_s": 500.0, "cpu_us_per_token": 500.0, "cpu_share": 0.25, "seconds": 4.0}


async def test_the_stand_in_learner_takes_what_is_ready_and_nothing_is_generated_twice(tmp_path: Path) -> None:
    directory = checkpoint.folder(tmp_path, "toy", SHAPES["toy"])
    checkpoint.write(SHAPES["toy"], directory, "cpu")
    with EmbeddedServer(tmp_path / "server") as server:
        settings = ("run.name=stand-in", f"model.path={directory}", "learner.group_size=2")
        learner = StandInLearner(server.url, load_recipe("arithmetic-dense.yaml", settings))
        broker = await open_broker(server.url, "stand-in")
        learner.feed()
        for step in range(2):
            learner.publish()
            reply = await broker.leases.lease("w", WeightVersion(1, step), 6, 60.0)
            assert len(reply.leases) == 6
            for lease in reply.leases:
                await broker.leases.submit(lease, finished(lease, WeightVersion(1, step)))
            learner.take()
            assert learner.taken == 6 * (step + 1)
        assert (await broker.status.snapshot()).queues.requeued_stale == 0
        await broker.close()
        learner.close()


def finished(lease: Lease, version: WeightVersion) -> Trajectory:
    tokens = np.array([3, 4], np.int32)
    return Trajectory(
        tid=lease.tid,
        prompt_tokens=np.array(lease.prompt.token_ids, np.int32),
        response_tokens=tokens,
        behavior_logprobs=np.zeros(2, np.float32),
        loss_mask=np.ones(2, np.uint8),
        spans=(VersionSpan(0, 2, version),),
        reward=0.0,
        rewards={},
        finish_reason="stop",
        worker="w",
    )

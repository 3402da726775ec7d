"""The benchmark of engine against learner measures the quantities that it names."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import agreement, models
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.learner.batching.packing import PackableSequence


def test_engine_and_learner_agree_and_replay_takes_what_the_engine_chose(tmp_path: Path) -> None:
    shape = models.SHAPES["toy-moe"]
    directory = models.folder(tmp_path, "wide", shape)
    models.write(shape, directory, "cpu", agreement.SCALE)
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

"""A learner that only publishes: random weights of a shape, version after version, through the product's Publisher.

    python -m benchmarks.weight_sync.learner URL RUN ORDER     (ORDER: JSON, see `Order`)

Prints a line of JSON for every version, with moments of the machine's monotonic clock.
"""

import json
import sys
import time
from pathlib import Path

import msgspec
import torch

from broker import BlockingBroker
from broker.batches import CheckpointMark
from broker.schema import Probe, RunRules, WeightVersion
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher

from .order import Order
from .tensors import random_tensors, step

LONGEST_S = 400.0


def publish(url: str, run: str, order: Order) -> None:
    blocking = BlockingBroker(url, run)
    mark, rules = CheckpointMark(0, 0), RunRules(max_lag=1, groups_per_step=1)
    owner = blocking.call(blocking.broker.batches.claim(checkpoint=mark, rules=rules, config=b"", resume=False)).owner
    config = WeightsConfig(
        transport=order.transport,  # type: ignore[arg-type]
        staging=order.staging,  # type: ignore[arg-type]
        bucket_bytes=order.bucket_bytes,
        broadcast_timeout_s=order.timeout_s,
    )
    publisher = Publisher(blocking, owner, config)
    device = torch.device(order.device)
    tensors = random_tensors(Path(order.model), getattr(torch, order.dtype), device)
    for number in range(order.versions):
        if number:
            step(tensors)
        _finish(device)
        version = WeightVersion(owner.incarnation, number)
        began = time.monotonic()
        report = publisher.publish(
            version, publisher.stage(iter(tensors)), Probe(token_ids=[1, 2], logprobs=[0.0], tolerance=1e9)
        )
        line = {
            "version": number,
            "began": began,
            "announced": time.monotonic(),
            "bytes": report.nbytes,
            "tensors": len(tensors),
            "members": len(report.members),
            "failed": report.failed,
            "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
        }
        print(json.dumps(line), flush=True)
        _until_held(blocking, version)
    publisher.close()
    blocking.close()


def _until_held(blocking: BlockingBroker, version: WeightVersion) -> None:
    """Wait until a worker says that it holds `version` and can take part in the next broadcast."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        workers = blocking.call(blocking.broker.status.workers())
        if any(info.version == version and info.wants_broadcast for info in workers):
            return
        time.sleep(0.05)
    raise SystemExit(f"no worker held {version} after {LONGEST_S:.0f} s")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    publish(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Order))

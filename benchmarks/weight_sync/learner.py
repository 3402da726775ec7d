"""A learner that only publishes: random weights of a shape, version after version, through the product's Publisher.

    python -m benchmarks.weight_sync.learner URL RUN ORDER     (ORDER: JSON, see `Order`)

Under torchrun the weights are in shards, and the first rank publishes the tensors that all of them gather. Prints a
line of JSON for every version, with moments of the machine's monotonic clock.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark
from headway.broker.schema import RunRules, WeightVersion
from headway.broker.schema.weights import Probe
from headway.learner.ranks import join_ranks
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher

from .order import REST_S, Order
from .tensors import Named, Sharded, Whole

LONGEST_S = 400.0


def publish(url: str, run: str, order: Order) -> None:
    blocking = BlockingBroker(url, run)
    mark, rules = CheckpointMark(0, 0), RunRules(max_lag=1, groups_per_step=1)
    owner = blocking.call(blocking.broker.batches.claim(checkpoint=mark, rules=rules, config=b"", resume=False)).owner
    config = WeightsConfig(
        transport=order.transport,
        staging=order.staging,  # type: ignore[arg-type]
        bucket_bytes=order.bucket_bytes,
        broadcast_timeout_s=order.timeout_s,
    )
    publisher = Publisher(blocking, owner, config)
    for number, tensors in _versions(order):
        version = WeightVersion(owner.incarnation, number)
        began = time.monotonic()
        probe = Probe(token_ids=[1, 2], logprobs=[0.0], tolerance=1e9)
        report = publisher.publish(version, publisher.gather(tensors), probe)
        line = {
            "version": number,
            "began": began,
            "announced": time.monotonic(),
            "bytes": report.nbytes,
            "members": len(report.members),
            "failed": report.failed,
            "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if order.device == "cuda" else 0.0,
        }
        print(json.dumps(line), flush=True)
        _until_held(blocking, version)
        time.sleep(REST_S)
    publisher.close()
    blocking.close()


def gather(order: Order) -> None:
    """Take part in the gathering on a rank that publishes nothing."""
    for _, tensors in _versions(order):
        for _ in tensors:
            pass


def _versions(order: Order) -> Iterator[tuple[int, Iterator[Named]]]:
    """Yield each version once its step is done, at the same time on every rank."""
    device = join_ranks(order.device)
    kind = Whole if dist.get_world_size() == 1 else Sharded
    weights = kind(Path(order.model), getattr(torch, order.dtype), device)
    for number in range(order.versions):
        if number:
            weights.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(()))
        yield number, weights.named()


def _until_held(blocking: BlockingBroker, version: WeightVersion) -> None:
    """Wait until a worker reports that it holds `version` and can take part in the next broadcast."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        workers = blocking.call(blocking.broker.status.workers())
        if any(info.version == version for info in workers):
            return
        time.sleep(0.05)
    raise SystemExit(f"no worker held {version} after {LONGEST_S:.0f} s")


def main(url: str, run: str, encoded: str) -> None:
    order = msgspec.json.decode(encoded, type=Order)
    if int(os.environ.get("RANK", 0)):
        gather(order)
    else:
        publish(url, run, order)


if __name__ == "__main__":
    main(*sys.argv[1:])

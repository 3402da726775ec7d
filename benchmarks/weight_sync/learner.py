"""A learner that only publishes: random weights of a shape, version after version, through the product's Publisher.

    python -m benchmarks.weight_sync.learner URL RUN ORDER

Under torchrun the weights are in shards, and the first rank publishes the tensors that all of them gather. Prints a
line of JSON for every version, with moments of the machine's monotonic clock.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark
from headway.broker.schema import RunRules, WeightVersion
from headway.broker.schema.weights import Probe
from headway.learner.backends.fsdp.hugging_face import HuggingFaceExport
from headway.learner.backends.fsdp.sharding import local
from headway.learner.ranks import join_ranks
from headway.rollout_workers.engines.weight_loading.named_tensors import one_by_one
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher

from . import REST_S, Order

LONGEST_S = 400.0
Named = tuple[str, torch.Tensor]
SCALE = 0.02
_SLAB_BYTES = 1 << 30


class Whole:
    """All tensors on one device."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = random_tensors(directory, dtype, device)

    def step(self) -> None:
        """Replace every tensor's numbers by others of the same size."""
        step(self._tensors)

    def named(self) -> Iterator[Named]:
        return iter(self._tensors)


class Sharded:
    """Tensors sharded over the default process group by FSDP2, and gathered layer by layer as in the learner."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        model = _meta_model(directory, dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device=device)
        self._export = HuggingFaceExport(model, dtype)
        self._shards = [(name, local(shard.detach())) for name, shard in model.named_parameters()]
        for name, shard in self._shards:
            shard.normal_(1.0 if "norm" in name else 0.0, SCALE)

    def step(self) -> None:
        """Replace every tensor's numbers by others of the same size."""
        step(self._shards)

    def named(self) -> Iterator[Named]:
        """Yield the whole tensors. Collective."""
        return self._export.tensors()


def random_tensors(directory: Path, dtype: torch.dtype, device: torch.device) -> list[Named]:
    """Return tensors in which norms are near 1, and all else is near 0."""
    torch.manual_seed(0)
    slabs, meta = _Slabs(dtype, device), _meta_model(directory, torch.float32)
    # As checkpoints have them: experts one by one, a tied head left out.
    layout = one_by_one([(name, parameter.detach()) for name, parameter in meta.named_parameters()])
    named = [(name, slabs.take(tuple(tensor.shape))) for name, tensor in layout]
    for name, tensor in named:
        if "norm" in name:
            tensor.add_(1.0)
    return named


def _meta_model(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)


def step(tensors: list[Named]) -> None:
    """Replace a tensor's numbers by others of the same size: the order of its columns changes."""
    for _, tensor in tensors:
        tensor.copy_(tensor.flip(-1))


class _Slabs:
    """Tensors cut from large random pieces, so that tens of thousands of small ones are made in a second."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._options = {"dtype": dtype, "device": device}
        self._left = torch.empty(0, dtype=dtype, device=device)

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        if count > self._left.numel():
            size = max(count, _SLAB_BYTES // self._left.element_size())
            self._left = torch.randn(size, **self._options).mul_(SCALE)  # type: ignore[call-overload]
        taken, self._left = self._left[:count], self._left[count:]
        return taken.view(shape)


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
            "failed": report.failed,
        }
        print(json.dumps(line), flush=True)
        _until_held(blocking, version)
        time.sleep(REST_S)
    publisher.close()
    blocking.close()


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
    """Publish, or take part in the gathering on a rank that publishes nothing."""
    order = msgspec.json.decode(encoded, type=Order)
    if not int(os.environ.get("RANK", 0)):
        publish(url, run, order)
        return
    for _, tensors in _versions(order):
        for _ in tensors:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])

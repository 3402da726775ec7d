"""The first version of a run, or the base of its adapters, read from the model's files where a worker can read them,
instead of from the learner.

A path proves nothing: each bucket is compared with the published fingerprints, like one that came over the network, and
comes from the learner if anything is different. Then, and after the first version, no file is read any more.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import DeltaSpec, TensorSpec, WeightManifest
from headway.weightsync.deadline import Deadline
from headway.weightsync.tensors.base_weights import BASE
from headway.weightsync.tensors.buckets import DTYPES, aligned, verify, view
from headway.weightsync.transports.base import PullTransport

_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
"""The tensor of all experts of a layer, which files hold one by one."""
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

logger = logging.getLogger(__name__)


class FilesPull:
    """A PullTransport that reads a Hugging Face directory first, and asks `learner` for all that it does not hold."""

    def __init__(self, directory: Path, learner: PullTransport) -> None:
        self._learner = learner
        self._directory = directory
        self._files: dict[str, Path] | None = None
        """The file of each tensor; None: they have not been looked for."""
        self._opened: dict[Path, Any] = {}
        """The files that are open, as long as a pull lasts."""
        self._is_over = False
        """Whether the files are of no use, or no more."""

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See PullTransport."""
        if manifest.version.step or self._is_over:
            self._is_over = True
        elif self._read(manifest, index, bucket, deadline):
            return
        self._learner.pull_bucket(manifest, index, bucket, deadline)

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """See PullTransport."""
        return self._learner.pull_delta(manifest, delta, deadline)

    def forget(self) -> None:
        """See PullTransport."""
        self._opened.clear()
        self._learner.forget()

    def _read(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> bool:
        """Fill the bucket and verify it. Returns False if it is to come from the learner. Raises WeightSyncError once
        the deadline is over."""
        specs = [spec for spec in manifest.tensors if spec.bucket == index]
        try:
            if self._files is None:
                self._files = dict(_named_files(self._directory))
            for spec in specs:
                deadline.check("pull")
                self._fill(view(bucket, spec), spec)
                bucket[spec.offset + spec.nbytes : spec.offset + aligned(spec.nbytes)].zero_()
            verify(manifest, {index: bucket})
        except (OSError, KeyError, RuntimeError, ValueError, SafetensorError, WeightSyncError) as error:
            deadline.check("pull")  # of a pull that was stopped nothing is known
            if not self._is_over:
                self._is_over = True
                told = "the base of adapters" if manifest.version == BASE else f"version {manifest.version}"
                logger.info("%s comes from the learner, not from %s: %s", told, self._directory, error)
            return False
        return True

    def _fill(self, target: torch.Tensor, spec: TensorSpec) -> None:
        """Raises KeyError for a tensor that no file has, RuntimeError for one of another shape."""
        assert self._files is not None
        fused = None if spec.name in self._files else _EXPERTS.fullmatch(spec.name)
        if fused is None:
            self._copy(spec.name, target, spec)
            return
        parts = _PARTS[fused["part"]]
        for number, expert in enumerate(target):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                self._copy(f"{fused['experts']}.{number}.{part}.weight", rows, spec)

    def _copy(self, name: str, target: torch.Tensor, spec: TensorSpec) -> None:
        assert self._files is not None
        path = self._files[name]
        if (file := self._opened.get(path)) is None:  # several threads may open one: its header takes a while to read
            file = self._opened[path] = safe_open(path, framework="pt")
        if (shape := tuple(file.get_slice(name).get_shape())) != tuple(target.shape):  # told before it is read
            raise RuntimeError(f"{name} has the shape {shape} in {path}")
        target.copy_(file.get_tensor(name).to(DTYPES[spec.dtype]))


def files_first(model: Path | None, learner: PullTransport) -> PullTransport:
    """Return what reads the files in `model`, if it is given, and asks `learner` for all else."""
    return learner if model is None else FilesPull(model, learner)


def _named_files(directory: Path) -> Iterable[tuple[str, Path]]:
    """Yield every tensor's name and file."""
    for path in sorted(directory.glob("*.safetensors")):
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                yield from ((name, path) for name in file.keys())  # noqa: SIM118 - it is no mapping

"""The first version of a run, or the base of its adapters, read from the model's files where a worker can read them,
instead of from the learner.

A path proves nothing: each bucket is compared with the published fingerprints, like one that came over the network, and
comes from the learner if anything is different. Then, and after the first version, no file is read any more.

`base_in_files` returns the base of adapters as it lies in the files: it is neither pulled nor copied, and an engine's
processes map the files themselves. A caller that has loaded the files into an engine compares what the engine then
holds with the published fingerprints, or calls `verify_base` where the engine cannot say what it holds. Files of
another form than the learner publishes (experts one by one, another number format) are of no use there.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import DeltaSpec, TensorSpec, WeightManifest

from .deliveries import BufferSet, Delivery
from .limits import Deadline
from .tensors.buckets import DTYPES, aligned, as_bytes, verify, view
from .tensors.fingerprint import fingerprint
from .tensors.shared_memory import attachable_file
from .tensors.staging import BASE
from .transports.base import PullTransport
from .transports.threads import all_of

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
                what = "the base of adapters" if manifest.version == BASE else f"version {manifest.version}"
                logger.info("%s comes from the learner, not from %s: %s", what, self._directory, error)
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


AT_ONCE = 8
"""Threads that read and compare: one alone adds up some 2 GB a second."""
_PIECE = 1 << 24
"""Bytes that are read before a thread looks at its deadline again."""
_HEADER_AT = 8
"""Bytes of the number that a file begins with: the size of its header in JSON, after which the tensors lie."""
_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The names of number formats in a file's header, and ours."""


class _Entry(msgspec.Struct):
    """The header's entry of one tensor: https://github.com/huggingface/safetensors#format."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Bytes after the header: from, and up to."""


def base_in_files(directory: Path, manifest: WeightManifest, deadline: Deadline) -> Delivery | None:
    """Return the base that `manifest` describes, as it lies in the safetensors files in `directory`, unverified; None
    if they hold no tensors of these names, shapes and formats, if one of them is another, or if the deadline is over.
    Blocks while the files are read once, so that an engine that loads them does not wait for a disk."""
    try:
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
        files = tuple(attachable_file(path) for path in paths)
        lying = {spec.name: spec for number, file in enumerate(files) for spec in _lying(file, number, paths[number])}
        specs = tuple(_same(lying, spec) for spec in manifest.tensors)
        there = replace(manifest, tensors=specs, buckets=tuple(file.numel() for file in files))
        base = Delivery(there, BufferSet(files), may_be_reused=False, is_verified=False)
        by_size = sorted(range(len(specs)), key=lambda place: specs[place].nbytes)
        for place in by_size[len(specs) // 2 :][:1]:  # one matrix tells most other models apart
            _compare(base, place, deadline)
        used = {spec.bucket for spec in specs}
        all_of("files", AT_ONCE, [partial(_read, paths[number], deadline) for number in used], deadline)
    except (OSError, RuntimeError, ValueError, WeightSyncError) as error:
        logger.info("the base of adapters is not in %s: %s", directory, error)
        return None
    logger.info("the base of adapters is mapped from the files in %s", directory)
    return base


def verify_base(base: Delivery, deadline: Deadline) -> None:
    """Raise WeightSyncError unless every tensor has its published fingerprint, or if the deadline is over. Blocks while
    all of it is read."""
    places = range(len(base.manifest.tensors))
    all_of("files", AT_ONCE, [partial(_compare, base, place, deadline) for place in places], deadline)


def _compare(base: Delivery, place: int, deadline: Deadline) -> None:
    """Raise WeightSyncError if this tensor is another than was published, or if the deadline is over."""
    deadline.check("comparing the model's files with the base of adapters")
    name, tensor = base.tensors[place]
    if fingerprint(tensor) != base.manifest.fingerprints[place]:
        raise WeightSyncError(f"{name} is another tensor than was published")


def _read(path: Path, deadline: Deadline) -> None:
    """Have the system keep a file in its memory. It is not read where it is mapped: a process that maps a file dies
    where another one cuts it off."""
    piece = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            deadline.check("reading the model's files")


def _lying(file: torch.Tensor, number: int, path: Path) -> Iterator[TensorSpec]:
    """Yield the place of every tensor of a file. Raises ValueError where its header does not say it."""
    content = as_bytes(file)
    first = _HEADER_AT + int.from_bytes(content[:_HEADER_AT], "little")
    try:
        header = msgspec.json.decode(content[_HEADER_AT:first], type=dict[str, msgspec.Raw])
        entries = {name: msgspec.json.decode(at, type=_Entry) for name, at in header.items() if name != "__metadata__"}
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name} is no file of safetensors ({error})") from error
    for name, entry in entries.items():
        start, end = (first + offset for offset in entry.data_offsets)
        if not first <= start <= end <= len(content):
            raise ValueError(f"{name} lies outside of {path.name}")
        yield TensorSpec(name, _FORMATS.get(entry.dtype, entry.dtype), entry.shape, number, start, end - start)


def _same(lying: Mapping[str, TensorSpec], published: TensorSpec) -> TensorSpec:
    """Return the place of a published tensor in the files. Raises ValueError where they have another one, or none, or
    where no tensor of this format can lie."""
    found = lying.get(published.name)
    if found is None:
        raise ValueError(f"it has no {published.name}")
    there, wanted = ((one.dtype, one.shape, one.nbytes) for one in (found, published))
    if there != wanted:
        raise ValueError(f"{found.name} is there as {there}, published was {wanted}")
    if found.offset % DTYPES[found.dtype].itemsize:
        raise ValueError(f"{found.name} lies at {found.offset}, between two numbers")
    return found

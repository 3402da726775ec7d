"""The base of adapters as it lies in the model's files: it is neither pulled nor copied, and an engine's processes map
the files themselves.

As in `model_files`, a path proves nothing. A caller that has loaded the files into an engine compares what the engine
then holds with the published fingerprints, or calls `verify_base` where the engine cannot say what it holds. Files of
another form than the learner publishes (experts one by one, another number format) are of no use.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import TensorSpec, WeightManifest
from headway.weightsync.deadline import Deadline
from headway.weightsync.tensors.buckets import DTYPES, as_bytes
from headway.weightsync.tensors.fingerprint import fingerprint
from headway.weightsync.tensors.landing import Landed
from headway.weightsync.tensors.shared_memory import attachable_file
from headway.weightsync.transports.threads import all_of

from .deliveries import Delivery

AT_ONCE = 8
"""Threads that read and compare: one alone adds up some 2 GB a second."""
_PIECE = 1 << 24
"""Bytes that are read before a thread looks at its deadline again."""
_HEADER_AT = 8
"""Bytes of the number that a file begins with: the size of its header in JSON, after which the tensors lie."""
_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The names of number formats in a file's header, and ours."""

logger = logging.getLogger(__name__)


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
        base = Delivery(there, Landed(files), may_be_reused=False, is_verified=False)
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

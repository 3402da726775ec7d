"""The base of adapters as it lies in the model's files: it is neither pulled nor copied, and an engine's processes map
the files themselves.

As in `model_files`, a path proves nothing: every tensor is compared with its published fingerprint. Files of another
form than the learner publishes (experts one by one, another number format) are of no use here.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from broker.errors import WeightSyncError
from broker.schema.weights import TensorSpec, WeightManifest
from weightsync.deadline import Deadline
from weightsync.tensors.buckets import as_bytes, compare
from weightsync.tensors.fingerprint import fingerprint
from weightsync.tensors.landing import Landed
from weightsync.tensors.shared_memory import attachable_file
from weightsync.transports.threads import all_of

from .deliveries import Delivery, Part

AT_ONCE = 8
"""Threads that read and compare: one alone adds up some 2 GB a second."""
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
    """Return the base that `manifest` describes, as it lies in the safetensors files in `directory`; None if they do
    not hold it as it was published, or if the deadline is over. Blocks while all of it is read once."""
    try:
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
        files = tuple(attachable_file(path) for path in paths)
        lying = {spec.name: spec for number, file in enumerate(files) for spec in _lying(file, number)}
        specs = tuple(_same(lying, spec) for spec in manifest.tensors)
        there = replace(manifest, tensors=specs, buckets=tuple(file.numel() for file in files))
        landed = Landed(files)
        _compare(there, landed.tensors(specs), deadline)
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError, WeightSyncError) as error:
        logger.info("the base of adapters is not in %s as it was published: %s", directory, error)
        return None
    logger.info("the base of adapters is mapped from the files in %s", directory)
    return Delivery(there, landed, may_be_reused=False)


def _lying(file: torch.Tensor, number: int) -> Iterator[TensorSpec]:
    """Yield the place of every tensor of a file. Raises MsgspecError, and ValueError for a place outside of it."""
    content = as_bytes(file)
    first = _HEADER_AT + int.from_bytes(content[:_HEADER_AT], "little")
    for name, entry in msgspec.json.decode(content[_HEADER_AT:first], type=dict[str, msgspec.Raw]).items():
        if name != "__metadata__":
            place = msgspec.json.decode(entry, type=_Entry)
            start, end = (first + offset for offset in place.data_offsets)
            if not first <= start <= end <= len(content):
                raise ValueError(f"{name} lies outside of its file")
            yield TensorSpec(name, _FORMATS.get(place.dtype, place.dtype), place.shape, number, start, end - start)


def _same(lying: Mapping[str, TensorSpec], published: TensorSpec) -> TensorSpec:
    """Return the place of a published tensor in the files. Raises ValueError where they have another one, or none."""
    found = lying.get(published.name)
    if found is None or (found.dtype, found.shape, found.nbytes) != (
        published.dtype,
        published.shape,
        published.nbytes,
    ):
        raise ValueError(f"{published.name} is there as {found}")
    return found


def _compare(there: WeightManifest, tensors: Part, deadline: Deadline) -> None:
    """Raise WeightSyncError for a tensor that has another fingerprint than the published one."""

    def compared(place: int) -> None:
        deadline.check("comparing the model's files with the base of adapters")
        compare(there, {place: fingerprint(tensors[place][1])})

    all_of("files", AT_ONCE, [partial(compared, place) for place in range(len(tensors))], deadline)

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

from broker.errors import NoRoomError
from broker.schema.weights import TensorSpec, WeightManifest
from weightsync.deadline import Deadline
from weightsync.tensors.buckets import DTYPES, as_bytes, compare
from weightsync.tensors.fingerprint import fingerprint
from weightsync.tensors.landing import Landed
from weightsync.tensors.shared_memory import attachable_file
from weightsync.transports.threads import all_of

from .deliveries import Delivery

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


def base_in_files(directory: Path, manifest: WeightManifest) -> Delivery | None:
    """Return the base that `manifest` describes, as it lies in the safetensors files in `directory`, unverified; None
    if they hold no tensors of these names, shapes and formats."""
    try:
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
        files = tuple(attachable_file(path) for path in paths)
        lying = {spec.name: spec for number, file in enumerate(files) for spec in _lying(file, number)}
        specs = tuple(_same(lying, spec) for spec in manifest.tensors)
        landed = Landed(files)
        landed.tensors(specs)  # raises RuntimeError for a file that is no whole number of numbers
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError, NoRoomError) as error:
        logger.info("the base of adapters is not in %s: %s", directory, error)
        return None
    logger.info("the base of adapters is mapped from the files in %s", directory)
    there = replace(manifest, tensors=specs, buckets=tuple(file.numel() for file in files))
    return Delivery(there, landed, may_be_reused=False, is_verified=False)


def verify_base(base: Delivery, deadline: Deadline) -> None:
    """Raise WeightSyncError unless every tensor has its published fingerprint, or if the deadline is over. Blocks while
    all of it is read."""
    tensors = base.tensors

    def compared(place: int) -> None:
        deadline.check("comparing the model's files with the base of adapters")
        compare(base.manifest, {place: fingerprint(tensors[place][1])})

    all_of("files", AT_ONCE, [partial(compared, place) for place in range(len(tensors))], deadline)


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
    """Return the place of a published tensor in the files. Raises ValueError where they have another one, or none, or
    where no tensor of this format can lie."""
    found = lying.get(published.name)
    wanted = published.dtype, published.shape, published.nbytes
    if found is None or (found.dtype, found.shape, found.nbytes) != wanted:
        raise ValueError(f"{published.name} is there as {found}")
    if found.offset % DTYPES[found.dtype].itemsize:
        raise ValueError(f"{found.name} lies at {found.offset}, between two numbers")
    return found

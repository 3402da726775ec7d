"""Tensors by Hugging Face name into safetensors files that `from_pretrained` reads, and out of them one at a time."""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.broker.errors import ConfigError
from headway.learner.models.directory_checks import INDEX, SINGLE, shards

FILE_BYTES = 4 << 30
"""Size at which the next safetensors file begins."""

Read = Callable[[str], torch.Tensor]
"""One tensor by its name, whole."""


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
    """Write safetensors files of about 4 GiB at most and, if there are several, transformers' index of them."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(file_parts(tensors), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    files = sorted(set(weight_map.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / SINGLE)
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def file_parts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors into files of at most `FILE_BYTES`, unless one tensor has more; on the CPU, contiguous."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if part:
        yield part


def check_finite(tensor: torch.Tensor, name: str, path: Path) -> None:
    """Raise ConfigError for a tensor of a file with a number that is NaN or infinite. A model of such weights computes
    nothing that an engine and a learner could agree on."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return
    if torch.isfinite(torch.stack([*tensor.aminmax()])).all():  # one fast pass, which tells of every NaN
        return
    count = int((~torch.isfinite(tensor)).sum())
    raise ConfigError(
        f"model.path: {path}: {count:,} of {tensor.numel():,} numbers of {name} are NaN or infinite, so the file is"
        " damaged, or the training that wrote it had failed. Take a checkpoint from before that."
    )


def check_tied(names: Collection[str], read: Read, head: str, embedding: str) -> None:
    """Raise ConfigError for a model whose head is its embedding, if the files have another head besides."""
    if not {head, embedding} <= set(names) or torch.equal(read(head), read(embedding)):
        return
    raise ConfigError(
        f"model.path: config.json ties {head} to {embedding} (tie_word_embeddings), and its files have both, with other"
        f' numbers. Set "tie_word_embeddings": false there if the head was trained apart, or take {head} out of the'
        " files."
    )


@functools.cache
def weight_files(path: str) -> tuple[Path, ...]:
    """The safetensors files of a directory or hub id, downloaded if needed; empty where it has other formats only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    directory = Path(path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(path, allow_patterns=["model*.safetensors", INDEX]))
        except (OSError, HFValidationError):  # transformers, which reads other formats too, says what is wrong
            return ()
    return shards(directory)


class TensorFiles:
    """The tensors of several files, each read when it is asked for: no process ever holds the whole model."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the files' tables of contents. Raises ConfigError for a file that cannot be read."""
        from safetensors import SafetensorError, safe_open

        self.paths = tuple(paths)
        try:
            files = [safe_open(path, framework="pt") for path in paths]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.path: {self._where} cannot be loaded: {error}.") from error
        self._files: dict[str, tuple[Path, Any]] = {
            name: (path, file)
            for path, file in zip(self.paths, files, strict=True)
            for name in file.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
        }

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._files)

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU in the file's number format. Raises ConfigError where the files lack it, and for
        one with a number that is not finite."""
        if name not in self._files:
            raise ConfigError(f"{self._where} has no tensor {name}, which its config.json promises.")
        path, file = self._files[name]
        tensor: torch.Tensor = file.get_tensor(name)
        check_finite(tensor, name, path)
        return tensor

    @property
    def _where(self) -> Path:
        return self.paths[0].parent

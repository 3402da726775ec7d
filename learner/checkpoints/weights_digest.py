"""A digest of 32 hexadecimal digits is equal for two sets of weights exactly where their bits are."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns a digest of names, types, shapes and bytes; the order of the tensors does not matter."""
    parts = sorted(f"{name} {_tensor_digest(tensor)}" for name, tensor in tensors)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def saved_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the model in `directory`, one at a time."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name)


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

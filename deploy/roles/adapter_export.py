"""`headway export --adapter`: the adapter of a checkpoint as a PEFT directory, compared with the learner's backend.

DIRECTORY/    adapter_config.json  adapter_model.safetensors

For the comparison the written adapter is merged into its base in a directory that goes afterwards.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from headway.broker.errors import ConfigError
from headway.deploy.run.trained import TrainedModel
from headway.learner.backends.adapter import BASE, CONFIG, FOLDER, WEIGHTS, has_adapter
from headway.learner.backends.hugging_face_files import TensorFiles, write_tensors

from .export_check import Agreement, compare, limit_of

WriteModel = Callable[[Path, Path], object]
"""Writes the model of a checkpoint to a directory, whole."""


def check_has_adapter(model: TrainedModel) -> None:
    """Raise ConfigError for a checkpoint of a whole model."""
    if not has_adapter(model.path):
        raise ConfigError(
            f"{model.path} holds no adapter: its run trained the whole model (model.adapter is null). Leave --adapter"
            " out."
        )


def write_adapter(model: TrainedModel, target: Path, dtype: str | None) -> tuple[str, int]:
    """Write the adapter's two files; return its number format and its number of parameters."""
    source = model.path / FOLDER
    tensors = TensorFiles((source / WEIGHTS,))
    shutil.copyfile(source / CONFIG, target / CONFIG)
    if (source / BASE).exists():
        shutil.copyfile(source / BASE, target / BASE)
    kinds: dict[str, int] = {}

    def converted() -> list[tuple[str, torch.Tensor]]:
        found = [(name, tensors(name)) for name in sorted(tensors.names)]
        return [(name, tensor if dtype is None else tensor.to(getattr(torch, dtype))) for name, tensor in found]

    written = converted()
    for _, tensor in written:
        kind = str(tensor.dtype).removeprefix("torch.")
        kinds[kind] = kinds.get(kind, 0) + tensor.numel()
    write_tensors(written, target)
    (target / "model.safetensors").rename(target / WEIGHTS)
    (target / WEIGHTS).chmod((target / CONFIG).stat().st_mode)  # only its writer could read it; servers are others
    return max(kinds, key=lambda kind: kinds[kind]), sum(kinds.values())


def compare_adapter(
    model: TrainedModel, exported: Path, device: str, *, written: str, write_model: WriteModel
) -> Agreement:
    """Compare what the exported adapter, `written` in that number format, makes of its base with the state of the
    checkpoint, as `compare` does."""
    with tempfile.TemporaryDirectory(dir=exported.parent) as directory:
        beside, merged = Path(directory, "beside"), Path(directory, "merged")
        merged.mkdir()
        shutil.copytree(model.path, beside, ignore=shutil.ignore_patterns("training_state", "*.safetensors", FOLDER))
        shutil.copytree(exported, beside / FOLDER)
        write_model(beside, merged)
        found = compare(model, merged, device)
    return msgspec.structs.replace(found, limit=max(found.limit, limit_of(written)))

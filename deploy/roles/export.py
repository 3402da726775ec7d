"""`headway export`: a trained model as the files that vLLM and transformers load, compared with the learner's backend.

DIRECTORY/    model*.safetensors  config.json and all other files of the checkpoint's model

The directory is written under another name beside its place, checked there, and renamed once it is durable.
"""

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch

from headway.broker.errors import ConfigError, HeadwayError
from headway.deploy.run.trained import TrainedModel, is_model
from headway.learner.backends.adapter import CONFIG as ADAPTER_CONFIG
from headway.learner.backends.adapter import open_weights, trained_base
from headway.learner.backends.hugging_face_files import write_tensors
from headway.learner.backends.score_head import has_score_head
from headway.learner.checkpoints.checkpoint import FILES_FILE, partial_path, put_in_place
from headway.learner.checkpoints.disk import free_mib
from headway.learner.config import ModelConfig
from headway.learner.models.model_files import classifier_files, kept_files, write_files

from .adapter_export import check_has_adapter, compare_adapter, write_adapter
from .export_check import Agreement, compare

Dtype = Literal["bfloat16", "float32"]


class ExportError(HeadwayError):
    """A model could not be exported, or the exported files compute something else than the learner's backend."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were written, and their agreement with the backend."""

    directory: str
    checkpoint: str
    dtype: str
    parameters: int
    bytes: int
    """The size of all files."""
    quantized: str
    """The number format of the base that an adapter was trained beside: nf4, int8, or none."""
    check: Agreement | None
    """None: the caller wanted no comparison."""


def export_model(
    model: TrainedModel,
    directory: Path,
    *,
    dtype: Dtype | None,
    is_checked: bool,
    is_forced: bool,
    device: str = "cpu",
    is_adapter: bool = False,
) -> Export:
    """Write the model, or its adapter alone, to `directory`, whole or not at all. `dtype`: None keeps the files' number
    format.

    Raises ExportError, ConfigError for a directory that must not be replaced, and CheckpointError for a checkpoint that
    the backend cannot load.
    """
    directory = Path(os.path.abspath(directory))  # "." has no name that could be given to another directory
    _refuse_what_holds_something(directory, is_forced)
    if is_checked and model.recipe is None:
        raise ConfigError(
            f"{model.path} is in no run's directory, so it is unknown which backend trained it. --no-check leaves the"
            " comparison out."
        )
    if is_adapter:
        check_has_adapter(model)
    partial = partial_path(directory)
    try:
        with _writing(directory):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if is_adapter:
                written, parameters = write_adapter(model, partial, dtype)
            else:
                written, parameters = write_model(model.path, partial, dtype)
        compared = (
            functools.partial(compare_adapter, written=written, write_model=write_model) if is_adapter else compare
        )
        check = compared(model, partial, device) if is_checked else None
        if check is not None and not check.is_close:
            raise ExportError(_disagreement(model, check))
        size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        with _writing(directory):
            put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Export(
        directory=str(directory),
        checkpoint=str(model.path),
        dtype=written,
        parameters=parameters,
        bytes=size,
        quantized=trained_base(model.path),
        check=check,
    )


def _refuse_what_holds_something(directory: Path, is_forced: bool) -> None:
    if not directory.exists() and not directory.is_symlink():
        return
    if not is_forced:
        raise ConfigError(f"{directory} exists. Choose another --out, or replace what is there with --force.")
    if (directory / FILES_FILE).exists() or directory.is_symlink():
        raise ConfigError(f"{directory} is a learner's checkpoint or a link; --force does not replace it.")
    if not directory.is_dir() or (
        any(directory.iterdir()) and not (is_model(directory) or (directory / ADAPTER_CONFIG).is_file())
    ):
        raise ConfigError(f"{directory} holds something else than a model; --force does not replace it.")


def write_model(source: Path, target: Path, dtype: Dtype | None = None) -> tuple[str, int]:
    """Write all files; return the weights' number format and the number of parameters. Holds one file's tensors at a
    time."""
    tensors = open_weights(str(source))
    if tensors is None:
        raise ExportError(f"{source} has no safetensors files.")
    _write_configuration(source, target, dtype)
    formats: dict[str, int] = {}

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(tensors.names):
            tensor = tensors(name)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, dtype))
            kind = str(tensor.dtype).removeprefix("torch.")
            formats[kind] = formats.get(kind, 0) + tensor.numel()
            yield name, tensor

    write_tensors(converted(), target)
    for path in target.glob("*.safetensors"):  # which only their writer may read; servers run as other users
        path.chmod((target / "config.json").stat().st_mode)
    return max(formats, key=lambda kind: formats[kind]), sum(formats.values())


def _write_configuration(source: Path, target: Path, dtype: Dtype | None) -> None:
    model = ModelConfig(path=str(source))
    kept = _own_config(source)
    write_files((classifier_files if has_score_head(model) else kept_files)(model, dtype=dtype or kept), target)


def _own_config(source: Path) -> str:
    """Return the number format that the model's own config.json names."""
    content = msgspec.json.decode((source / "config.json").read_bytes())
    return str(content.get("dtype") or content.get("torch_dtype") or "float32")


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turn a full disk, or a place that cannot be written, into an ExportError with the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ExportError(
            f"{directory} could not be written: {reason} ({free_mib(directory):.0f} MiB are free there). Nothing of the"
            " export is left. Make room, or choose another --out."
        ) from error


def _disagreement(model: TrainedModel, check: Agreement) -> str:
    return (
        f"The export of {model.path} is not kept: the {check.compared} of {check.tokens} tokens differ by"
        f" {check.mean_difference:.2g} on average from those of the backend {check.backend}, and {check.limit:g} is the"
        " limit. Is the checkpoint damaged? --no-check exports it as it is."
    )

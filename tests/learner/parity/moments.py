"""AdamW's moments as a checkpoint holds them, by Hugging Face name."""

import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

MOMENTS = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


def moments(backend: str, checkpoint: Path, model: Path) -> dict[str, Tensors]:
    """Return full tensors, whichever layout wrote them; `model` is the Hugging Face directory of the model."""
    if backend == "megatron":
        return {moment: _of_files(checkpoint / moment) for moment in MOMENTS}
    saved = _of_distributed_checkpoint(checkpoint / "training_state")
    with torch.device("meta"):
        architecture = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {moment: _named_as_in_files(architecture, saved, moment) for moment in MOMENTS}


def _of_files(directory: Path) -> Tensors:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _of_distributed_checkpoint(directory: Path) -> Tensors:
    reader = FileSystemReader(directory)
    held = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in held.items()
        if isinstance(about, TensorStorageMetadata) and name.endswith(MOMENTS)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _named_as_in_files(architecture: PreTrainedModel, saved: Tensors, moment: str) -> Tensors:
    prefix, suffix = "optimizer.", f".{moment}"
    chosen = {
        name.removeprefix(prefix).removesuffix(suffix): tensor
        for name, tensor in saved.items()
        if name.endswith(suffix)
    }
    named: Tensors = revert_weight_conversion(architecture, chosen)
    return named

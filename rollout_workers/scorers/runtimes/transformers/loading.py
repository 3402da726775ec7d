"""Loads a scorer's model by transformers, and lays sequences of several lengths into one batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.engines.embedded.device import device_named
from headway.rollout_workers.scorers.base import ScoringModel, UnfitModelError
from headway.rollout_workers.scorers.runtimes.files import no_weights, reading


def load(model_class: Any, asked: ScoringModel, config: ScorersConfig, **options: Any) -> Any:
    """Return the model on the scorers' device, in evaluation mode. No file of it can run code.

    Raises UnfitModelError, which names its key, where it cannot be loaded or lacks weights, and ConfigError for a
    device that torch cannot use.
    """
    device = device_named(config.device, "scorers.device")
    with reading(asked.path, asked.key):
        model, found = model_class.from_pretrained(
            asked.path,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):
        raise no_weights(asked, missing)
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not torch.isfinite(torch.stack([*weight.aminmax()])).all():
            raise UnfitModelError(f"{asked.key}: {asked.path} has weights that are NaN or infinite in {name}.")
    torch.set_num_threads(config.threads)
    return model.to(device).eval().requires_grad_(requires_grad=False)


def padded(
    sequences: Sequence[NDArray[np.int32]], padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, L] int64 token ids, with `padding` behind the shorter sequences, and their [B, L] int64 mask."""
    longest = max(map(len, sequences))
    ids_BL = np.full((len(sequences), longest), padding, np.int64)
    mask_BL = np.zeros((len(sequences), longest), np.int64)
    for row, tokens in enumerate(sequences):
        ids_BL[row, : len(tokens)] = tokens
        mask_BL[row, : len(tokens)] = 1
    return torch.from_numpy(ids_BL).to(device), torch.from_numpy(mask_BL).to(device)

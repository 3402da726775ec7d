"""Loads a scorer's model by transformers, and lays sequences of several lengths into one batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from broker.schema import ScoreRequest
from rollout_workers.config import ScorersConfig
from rollout_workers.scorers.base import UnfitModelError


def load(model_class: Any, path: str, config: ScorersConfig, key: str, **options: Any) -> Any:
    """Return the model in `path` on the scorers' device, in evaluation mode. No file of it can run code.

    Raises UnfitModelError, which names `key`, where it cannot be loaded or lacks weights.
    """
    with _reading(path, key):
        model, found = model_class.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):
        raise UnfitModelError(
            f"{key}: {path} has no weights {', '.join(missing[:3])} and is no {model_class.__name__} that was trained."
        )
    torch.set_num_threads(config.threads)
    return model.to(config.device).eval().requires_grad_(requires_grad=False)


def check_same_tokenizer(path: str, policy: Path, key: str) -> None:
    """Raise UnfitModelError unless a token id means the same to the scorer's model as to the policy. A directory
    without a tokenizer is taken at its word."""
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(policy, trust_remote_code=False).get_vocab()
    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").exists():
        return
    with _reading(path, key):
        theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            raise UnfitModelError(
                f"{key}: {path} has another tokenizer than the policy: {token!r} is token {number} of the policy and"
                f" {theirs.get(token, 'no token')} there. A scorer is given the policy's tokens, so take a model that"
                " was trained from one of the policy's family."
            )


def sequence(request: ScoreRequest) -> NDArray[np.int32]:
    """Return [P + R] tokens."""
    return np.concatenate([request.prompt_tokens, request.response_tokens])


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


def longest_of(model: Any) -> int:
    """Return the most tokens that the model's positions allow."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)


def vocabulary_of(policy: Path) -> int:
    """Return how many token ids the model of a directory has, of which only the configuration need be there."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(policy, trust_remote_code=False).get_text_config().vocab_size)


@contextmanager
def _reading(path: str, key: str) -> Iterator[None]:
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise UnfitModelError(f"{key}: there is no directory {path}. Give the directory of a model, or a hub id.")
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnfitModelError(f"{key}: {path} cannot be loaded: {' '.join(str(error).split())[:500]}") from error

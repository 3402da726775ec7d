"""An exported model compared with the learner's backend: both compute the logprobs of the same tokens.

transformers loads the exported files; the backend loads the checkpoint's own state, from which training would go on. So
the comparison sees a wrong name, a wrong layout or a damaged file on either side.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from deploy.run.trained import TrainedModel
from learner.backends import open_backend
from learner.checkpoints.checkpoint import read_checkpoint
from learner.checkpoints.digests import check_digests
from learner.config import ModelConfig
from learner.rows.packing import PackableSequence, concatenate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 24
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean absolute difference of logprobs, by the coarser number format of the two. Rounding alone stays far below; a
tensor in the place of another one changes logprobs by about 1."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far the logprobs of two implementations of one model are apart."""

    backend: str
    tokens: int
    mean_difference: float
    """The mean of the absolute differences, in nats."""
    largest_difference: float
    limit: float
    """The largest mean difference that rounding explains."""

    @property
    def is_close(self) -> bool:
        return self.mean_difference <= self.limit


def compare(model: TrainedModel, exported: Path, device: str) -> Agreement:
    """Compare the files in `exported` with the state of the checkpoint `model`, in this process, on `device`.

    Raises CheckpointError where the checkpoint is damaged or holds no learner's state.
    """
    assert model.recipe is not None
    read_checkpoint(model.path)
    check_digests(model.path, 0, 1)
    sequences_BL, theirs_T, exported_dtype = _by_transformers(exported, device)
    learner, dtype = model.recipe.learner, model.recipe.model.dtype
    backend = open_backend(
        learner.backend, ModelConfig(path=str(model.path), dtype=dtype), model.recipe.optimizer, device=device
    )
    backend.load(model.path)
    batch = concatenate([_packable(tokens) for tokens in sequences_BL.numpy().astype(np.int32)])
    mine_T = backend.logprobs([batch], temperature=1.0)[0].cpu()
    difference_T = (mine_T - theirs_T).abs()
    coarser = min(exported_dtype, getattr(torch, dtype), key=lambda one: one.itemsize)
    return Agreement(
        backend=learner.backend,
        tokens=sequences_BL[:, 1:].numel(),
        mean_difference=float(difference_T.sum() / sequences_BL[:, 1:].numel()),
        largest_difference=float(difference_T.max()),
        limit=LIMITS[coarser],
    )


@torch.no_grad()
def _by_transformers(directory: Path, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return sequences [B, L] that the model itself has sampled, their logprobs [B * L], which are 0 for first tokens,
    and the number format of its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    sequences_BL = _sampled(model)
    logits_BLV = model(input_ids=sequences_BL).logits[:, :-1].float()
    logprobs_BL = logits_BLV.log_softmax(-1).gather(2, sequences_BL[:, 1:, None])[..., 0]
    first_zero_BL = torch.nn.functional.pad(logprobs_BL, (1, 0))
    return sequences_BL.cpu(), first_zero_BL.flatten().cpu(), model.dtype


def _sampled(model: "PreTrainedModel") -> torch.Tensor:
    """Return sequences [B, L] that continue random tokens: the model finds them likely, whatever its language."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = torch.randint(0, model.config.vocab_size, (SEQUENCES, PROMPT_TOKENS)).to(model.device)
        sampled: torch.Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )
    return sampled


def _packable(token_ids: "np.typing.NDArray[np.int32]") -> PackableSequence:
    response = len(token_ids) - PROMPT_TOKENS
    return PackableSequence(
        token_ids=token_ids,
        prompt_length=PROMPT_TOKENS,
        loss_mask=np.ones(response, np.uint8),
        behavior_logprobs=np.zeros(response, np.float32),
        lags=np.zeros(response, np.int64),
        advantages=np.zeros(response, np.float32),
    )

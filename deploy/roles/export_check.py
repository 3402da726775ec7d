"""An exported model compared with the learner's backend: both compute the logprobs of the same tokens, or the scores of
the same texts if it is a reward model.

transformers loads the exported files; the backend loads the checkpoint's own state, from which training would go on. So
the comparison sees a wrong name, a wrong layout or a damaged file on either side.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import torch

from headway.deploy.run.trained import TrainedModel
from headway.learner.backends import open_backend
from headway.learner.backends.adapter import adapted_model, has_adapter
from headway.learner.backends.score_head import has_score_head
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.checkpoints.checkpoint import check_digests, read_checkpoint
from headway.learner.config import ModelConfig
from headway.learner.stages.supervised.reward_model import with_state_behind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 24
TEXTS = 16
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean absolute difference, by the coarser number format of the two. Rounding alone stays far below; a tensor in the
place of another one changes logprobs, and scores, by about 1."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The distance between the logprobs, or the scores, of two implementations of one model."""

    backend: str
    compared: Literal["logprobs", "scores"] = "logprobs"
    tokens: int
    """The number of tokens whose logprobs, or at which scores, were compared."""
    mean_difference: float
    """The mean of the absolute differences; of logprobs in nats."""
    largest_difference: float
    limit: float
    """The largest mean difference that rounding explains."""

    @property
    def is_close(self) -> bool:
        return self.mean_difference <= self.limit


def limit_of(dtype: str) -> float:
    """Return the largest mean difference that rounding to this number format explains."""
    return LIMITS[getattr(torch, dtype)]


def compare(model: TrainedModel, exported: Path, device: str) -> Agreement:
    """Compare the files in `exported` with the state of the checkpoint `model`, in this process, on `device`.

    Raises CheckpointError where the checkpoint is damaged or holds no learner's state.
    """
    assert model.recipe is not None
    read_checkpoint(model.path)
    check_digests(model.path, 0, 1)
    source = ModelConfig(path=str(model.path), dtype=model.recipe.model.dtype)
    source = adapted_model(source) if has_adapter(model.path) else source
    is_scored = has_score_head(source)
    mine, theirs, exported_dtype = (_scores if is_scored else _logprobs)(model, source, exported, device)
    differences = (mine - theirs).abs()
    coarser = min(exported_dtype, getattr(torch, source.dtype), key=lambda one: one.itemsize)
    return Agreement(
        backend=model.recipe.learner.backend,
        compared="scores" if is_scored else "logprobs",
        tokens=differences.numel(),
        mean_difference=float(differences.mean()),
        largest_difference=float(differences.max()),
        limit=LIMITS[coarser],
    )


def _logprobs(
    model: TrainedModel, source: ModelConfig, exported: Path, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the backend's and transformers' logprobs of all tokens but first ones, and the exported number format."""
    assert model.recipe is not None
    sequences_BL, theirs_BL, dtype = _by_transformers(exported, device)
    backend = open_backend(model.recipe.learner.backend, source, model.recipe.optimizer, device=device)
    backend.load(model.path)
    batch = concatenate([_packable(tokens) for tokens in sequences_BL.numpy().astype(np.int32)])
    mine_T = backend.logprobs([batch], temperature=1.0)[0].cpu()
    return mine_T.view(sequences_BL.shape)[:, 1:], theirs_BL, dtype


def _scores(
    model: TrainedModel, source: ModelConfig, exported: Path, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the backend's and transformers' scores of random texts, and the exported number format."""
    from transformers import AutoModelForSequenceClassification

    assert model.recipe is not None
    theirs = AutoModelForSequenceClassification.from_pretrained(exported, dtype="auto").to(device).eval()
    backend = open_backend(model.recipe.learner.backend, source, model.recipe.optimizer, device=device, head="score")
    backend.load(model.path)
    texts_BL = _texts(theirs.config)
    row = concatenate([with_state_behind(tokens) for tokens in texts_BL.numpy().astype(np.int32)])
    mine_B = backend.values([row])[0][row.loss_mask_T > 0].cpu()
    with torch.no_grad():
        theirs_B = theirs(input_ids=texts_BL.to(device)).logits[:, 0].float().cpu()
    return mine_B, theirs_B, theirs.dtype


def _texts(config: "PretrainedConfig") -> torch.Tensor:
    """Return random texts [B, L] without the padding token, before which transformers would read a score."""
    draws = torch.Generator().manual_seed(0)
    ids_BL: torch.Tensor = torch.randint(0, config.vocab_size - 1, (TEXTS, PROMPT_TOKENS + NEW_TOKENS), generator=draws)
    ids_BL += (ids_BL >= config.pad_token_id).long()
    return ids_BL


@torch.no_grad()
def _by_transformers(directory: Path, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return sequences [B, L] that the model itself has sampled, the logprobs [B, L - 1] of all tokens but first ones,
    and the number format of its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    sequences_BL = _sampled(model)
    logits_BLV = model(input_ids=sequences_BL).logits[:, :-1].float()
    logprobs_BL = logits_BLV.log_softmax(-1).gather(2, sequences_BL[:, 1:, None])[..., 0]
    return sequences_BL.cpu(), logprobs_BL.cpu(), model.dtype


def _sampled(model: "PreTrainedModel") -> torch.Tensor:
    """Return sequences [B, L] that continue random tokens: the model finds them likely, whatever its language."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # the model's own may ask for beams, or for no sampling
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

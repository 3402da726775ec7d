"""The same steps by transformers, torch's AdamW and clipping, in fp32 and with one sequence at a time, never packed."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.learner.batching.packing import PackableSequence
from tests.learner.tiny import ENTROPY_COEFFICIENT

from .cases import LEARNING_RATE, OPTIMIZER, STEPS, TEMPERATURE
from .data import denominator, step_sequences
from .models import Shape
from .moments import MOMENTS, Tensors
from .outcome import Outcome


def reference(directory: Path, shape: Shape) -> Outcome:
    """Return the outcome that a backend must reach from this Hugging Face directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # the data hold the padding token, which is trained like others
    logits, logprobs = _forward_all(model, step_sequences(shape, 0))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )
    steps = [_step(model, optimizer, step_sequences(shape, step), has_bonus=step > 0) for step in range(STEPS)]
    tensors = {"logits": logits, "logprobs": logprobs, "parameters": _named_as_in_files(model, _parameters(model))}
    for moment in MOMENTS:
        values = {name: optimizer.state[parameter][moment] for name, parameter in model.named_parameters()}
        tensors[moment] = _named_as_in_files(model, values)
    losses, norms = map(list, zip(*steps, strict=True))
    return Outcome(losses=losses, norms=norms, tensors=tensors)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, given: list[PackableSequence], *, has_bonus: bool
) -> tuple[float, float]:
    """Return (loss, gradient norm before clipping)."""
    optimizer.zero_grad()
    loss = torch.stack([_loss_sum(model, sequence, has_bonus=has_bonus) for sequence in given]).sum() / denominator(
        given
    )
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    optimizer.step()
    return loss.item(), norm.item()


def _loss_sum(model: PreTrainedModel, sequence: PackableSequence, *, has_bonus: bool) -> torch.Tensor:
    """Return - sum over the response of mask * advantage * exp(current - behavior), with the bonus for entropy that
    `ratio_loss` has."""
    response_R, mask_R = slice(sequence.prompt_length, None), torch.from_numpy(sequence.loss_mask)
    logits_LV, logprobs_L = _forward(model, sequence)
    ratio_R = (logprobs_L[response_R] - torch.from_numpy(sequence.behavior_logprobs)).exp()
    loss = -(mask_R * torch.from_numpy(sequence.advantages) * ratio_R).sum()
    before_R = slice(sequence.prompt_length - 1, -1)
    entropies_R = torch.distributions.Categorical(logits=logits_LV[before_R] / TEMPERATURE).entropy()
    return loss - ENTROPY_COEFFICIENT * (mask_R * entropies_R).sum() if has_bonus else loss


def _forward(model: PreTrainedModel, sequence: PackableSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([L, V] logits, [L] logprobs, 0 for the first token)."""
    token_ids_L = torch.from_numpy(sequence.token_ids).long()
    logits_LV = model(input_ids=token_ids_L[None]).logits[0]
    all_logprobs_LV = (logits_LV[:-1] / TEMPERATURE).log_softmax(-1)
    next_logprobs = all_logprobs_LV.gather(1, token_ids_L[1:, None])[:, 0]
    return logits_LV, torch.nn.functional.pad(next_logprobs, (1, 0))


@torch.no_grad()
def _forward_all(model: PreTrainedModel, given: list[PackableSequence]) -> tuple[Tensors, Tensors]:
    """Return logits and logprobs by the sequence's place."""
    both = [_forward(model, sequence) for sequence in given]
    return (
        {str(place): logits_LV for place, (logits_LV, _) in enumerate(both)},
        {str(place): logprobs_L for place, (_, logprobs_L) in enumerate(both)},
    )


def _parameters(model: PreTrainedModel) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _named_as_in_files(model: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Rename tensors: transformers trains a layer's experts as one tensor and writes each expert's own."""
    named: Tensors = revert_weight_conversion(model, tensors)
    return named

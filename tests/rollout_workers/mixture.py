"""The logprobs of a sample that ran across a swap which kept its cache: new weights over old keys and values."""

import torch
from transformers import DynamicCache, PreTrainedModel

from .generation import Response


@torch.no_grad()
def mixture_difference(old: PreTrainedModel, new: PreTrainedModel, response: Response, switch: int) -> torch.Tensor:
    """Return [R - switch] absolute differences between the engine's logprobs from token `switch` on and expected ones.

    A transformers forward of the new weights computes the expected ones over the old weights' cache, which holds all
    but the last token sampled before.
    """
    cached = len(response.prompt) + switch - 1
    tokens_BT = torch.tensor([[*response.prompt, *response.tokens]])
    cache = DynamicCache(config=old.config)
    old(tokens_BT[:, :cached], past_key_values=cache, use_cache=True)
    logits_TV = new(tokens_BT[:, cached:-1], past_key_values=cache, use_cache=True).logits[0].float()
    expected_T = torch.log_softmax(logits_TV, -1).gather(1, tokens_BT[0, cached + 1 :, None])[:, 0]
    return (expected_T - torch.tensor(response.logprobs[switch:])).abs()

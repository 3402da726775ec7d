"""Chooses the next token of many sequences at once. Shapes: N sequences, V vocabulary."""

from collections.abc import Sequence

import torch

from headway.rollout_workers.engines.base import GenerationRequest


class Sampler:
    """Samples with one generator for all requests; a request with a seed gets a generator of its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def own_generator(self, request: GenerationRequest) -> torch.Generator | None:
        """Return the generator of a seeded request, so that its tokens do not depend on the requests beside it."""
        return None if request.seed is None else torch.Generator(self._device).manual_seed(request.seed)

    def sample(
        self,
        logits_NV: torch.Tensor,
        requests: Sequence[GenerationRequest],
        generators: Sequence[torch.Generator | None],
    ) -> tuple[list[int], list[float]]:
        """Return tokens and their logprobs (fp32, temperature applied, before the cuts of top-k and top-p)."""
        temperatures = [request.temperature or 1.0 for request in requests]
        temperature_N = torch.tensor(temperatures, device=self._device)
        logprobs_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
        weights_NV = cut(logprobs_NV, requests).exp()
        if any(request.temperature > 0 for request in requests):
            weights_NV = weights_NV / self._noise(weights_NV, requests, generators)
        tokens_N = weights_NV.argmax(dim=-1)
        sampled_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        return tokens_N.tolist(), sampled_N.tolist()

    def _noise(
        self,
        weights_NV: torch.Tensor,
        requests: Sequence[GenerationRequest],
        generators: Sequence[torch.Generator | None],
    ) -> torch.Tensor:
        """Return [N, V] noise from Exp(1): argmax(p / noise) is a sample of p. A greedy request has ones."""
        noise_NV = torch.empty_like(weights_NV).exponential_(generator=self._generator)
        for row, (request, generator) in enumerate(zip(requests, generators, strict=True)):
            if request.temperature == 0:
                noise_NV[row] = 1.0
            elif generator is not None:
                noise_NV[row].exponential_(generator=generator)
        return noise_NV


def cut(logprobs_NV: torch.Tensor, requests: Sequence[GenerationRequest]) -> torch.Tensor:
    """Set logprobs to -inf outside each request's top-k and nucleus. The likeliest token always stays."""
    rows = [row for row, request in enumerate(requests) if request.top_k > 0 or request.top_p < 1]
    if not rows:
        return logprobs_NV
    vocabulary = logprobs_NV.shape[1]
    kept = [requests[row].top_k or vocabulary for row in rows]
    top_k = torch.tensor(kept, device=logprobs_NV.device)[:, None]
    top_p = torch.tensor([requests[row].top_p for row in rows], device=logprobs_NV.device)[:, None]
    ordered, order = logprobs_NV[rows].sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=ordered.device) >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= top_p
    beyond[:, 0] = False
    result = logprobs_NV.clone()
    result[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(beyond, -torch.inf))
    return result

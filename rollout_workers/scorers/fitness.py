"""A scorer takes only fit requests to its model: any program may hold a worker's password, so no request is trusted."""

from dataclasses import dataclass

import numpy as np

from headway.broker.schema import ScoreRequest

from .base import Runner

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 1e3
"""Those of `sampling.temperature`: logits are divided by it, in float32."""


@dataclass(frozen=True)
class RequestLimits:
    """The bounds of an honest request of the run."""

    most_response_tokens: int
    """`sampling.max_new_tokens`"""
    most_tokens: int
    """The most tokens of prompt and response: `engine.max_model_len`."""
    most_candidates: int = 0
    """`algorithm.distillation.top_k`"""


def why_unfit(request: ScoreRequest, runner: Runner, limits: RequestLimits, kind: str) -> str:
    """Return why this model is not asked; "" where it can score the request."""
    prompt, response = len(request.prompt_tokens), len(request.response_tokens)
    if not prompt:
        return "it has no prompt tokens, after which a response would have a probability"
    if not LOWEST_TEMPERATURE <= request.temperature <= HIGHEST_TEMPERATURE:
        return f"its temperature is {request.temperature:g}, outside {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
    highest = max(int(part.max()) for part in (request.prompt_tokens, request.response_tokens))
    if highest >= runner.vocabulary:
        return f"it has token {highest}, and the vocabulary of the {kind} ends at {runner.vocabulary}"
    if prompt + response > runner.longest:
        return f"it has {prompt + response} tokens, and the {kind} reads {runner.longest} at most"
    if response > limits.most_response_tokens:
        return f"its response has {response} tokens, and sampling.max_new_tokens is {limits.most_response_tokens}"
    if prompt + response > limits.most_tokens:
        return f"it has {prompt + response} tokens, and engine.max_model_len is {limits.most_tokens}"
    if request.top_k > min(limits.most_candidates, runner.vocabulary):
        return (
            f"it wants {request.top_k} candidates in each place; algorithm.distillation.top_k is"
            f" {limits.most_candidates}, and the {kind} knows {runner.vocabulary} tokens"
        )
    return ""


def probe() -> ScoreRequest:
    """Return a request that every model can score unless it is broken."""
    token = np.zeros(1, np.int32)
    return ScoreRequest(prompt_tokens=token, response_tokens=token)

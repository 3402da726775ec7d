"""A sample as SGLang's requests, and SGLang's outputs as tokens with logprobs and the experts that routers chose.

SGLang tells a request's rows of experts once, with its last output, also where the request was ended by us. So a sample
whose experts are wanted arrives in one chunk for each of its requests.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts
from headway.rollout_workers.engines.base import FinishReason, GenerationRequest
from headway.rollout_workers.engines.external_engine import RoutedLayers

from .lora_pool import adapter_name, can_pin

ALL_TOKENS = -1
"""SGLang's `top_k` that cuts nothing."""
STRETCH = 1024
"""The most tokens of a request that tells experts, which come with its last output: a longer sample takes several, so
that its tokens are saved meanwhile and it is not taken for one that does not get on."""


@dataclass(eq=False)
class SampleRequests:
    """One sample, over all requests that it takes."""

    asked: GenerationRequest
    limit: int
    """The most tokens of its response."""
    salt: int
    """The swap after which its first request began. SGLang shares prefixes between requests of one salt."""
    place: int = 0
    """The place of its adapter; 0 without any."""
    tokens: list[int] = field(default_factory=list)
    request_id: str = ""
    """The id of the request that is running or was the last."""
    is_closed: bool = False
    """Whether its reader has gone."""

    @property
    def first_row(self) -> int | None:
        """The token from which on the next request must tell experts; None if they are not wanted."""
        if self.asked.experts_from is None or not self.tokens:
            return self.asked.experts_from
        return len(self.asked.prompt_tokens) + len(self.tokens) - 1

    def request(self) -> Any:
        """Return the rest of the sample as SGLang's request, which is called `request_id`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked, left = self.asked, self.limit - len(self.tokens)
        sampling: dict[str, Any] = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or ALL_TOKENS,
            "max_new_tokens": left if self.first_row is None else min(left, STRETCH),
            "stop_token_ids": asked.stop_token_ids,
            "ignore_eos": not asked.stop_token_ids,
        }
        if asked.seed is not None:
            sampling["sampling_seed"] = asked.seed
        return GenerateReqInput(
            input_ids=[*asked.prompt_tokens, *self.tokens],
            sampling_params=sampling,
            return_logprob=True,
            stream=True,
            rid=self.request_id,
            extra_key=str(self.salt),
            lora_path=adapter_name(self.place),
            **({} if self.first_row is None else expert_request_arguments(self.first_row)),
        )


def scoring(token_ids: Sequence[int], request_id: str, salt: int, place: int) -> Any:
    """Return a request for the logprobs of given tokens, with the adapter of a place. SGLang computes these at
    temperature 1, and always anew."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        input_ids=list(token_ids),
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        stream=True,
        rid=request_id,
        extra_key=f"score-{salt}",
        lora_path=adapter_name(place),
    )


def new_tokens(output: Any, seen: int) -> tuple[list[int], list[float]]:
    """Return the tokens after the first `seen` of a request, with their logprobs. Outputs repeat all tokens of their
    request, but that of a request which ended in the queue names only the last; its logprobs are complete."""
    entries = output["meta_info"].get("output_token_logprobs") or ()
    return [int(entry[1]) for entry in entries[seen:]], [float(entry[0]) for entry in entries[seen:]]


def ending(output: Any) -> FinishReason | Literal["abort"] | None:
    """Translate SGLang's finish reason; None if the request goes on. Raises HeadwayError if SGLang refused it."""
    match output["meta_info"].get("finish_reason"):
        case None:
            return None
        case {"type": "stop" | "length" as reason}:
            return reason  # type: ignore[no-any-return]
        case {"type": "abort", "status_code": int(), "message": message}:
            raise HeadwayError(f"SGLang refused or lost a request: {message}")
        case {"type": "abort"}:
            return "abort"
        case other:
            raise HeadwayError(f"SGLang ended a request with {other!r}")


OPTION = "enable_return_routed_experts"
START = "routed_experts_start_len"


def expert_arguments() -> dict[str, Any]:
    """Return what SGLang is started with. Raises HeadwayError where it cannot tell experts: on a CPU, and in releases
    whose requests cannot ask for the rows from a token on."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not can_pin():
        raise HeadwayError(
            "SGLang tells which experts it chose on GPUs only (it keeps them in pinned memory): set"
            " engine.kind=embedded, or algorithm.router_replay=false"
        )
    if not hasattr(GenerateReqInput, START):
        raise HeadwayError(
            "this release of SGLang does not tell which experts it chose from a given token on: install 0.5.17 or"
            " newer, or set algorithm.router_replay=false"
        )
    return {OPTION: True}


def expert_request_arguments(first: int) -> dict[str, Any]:
    """Return the arguments of a request for the rows from the token at `first` on."""
    return {"return_routed_experts": True, START: first}


def routed_expert_rows(output: Any, routed: RoutedLayers, layers: int, count: int) -> Experts | None:
    """Return the `count` rows that came with a request's last output; None if none came. `layers`: those of the model.

    Raises HeadwayError if SGLang told another number of rows.
    """
    encoded = output["meta_info"].get("routed_experts")
    if encoded is None:
        return None
    numbers = np.frombuffer(base64.b64decode(encoded), np.int32).astype(np.uint16)
    rows, rest = divmod(len(numbers), layers)
    if rest or not count or rows % count:
        raise HeadwayError(f"SGLang told {len(numbers)} experts for {count} tokens of {layers} layers: not understood")
    return routed.rows(numbers.reshape(count, layers, -1))

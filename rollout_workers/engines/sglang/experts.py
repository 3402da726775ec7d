"""The experts that SGLang's routers chose (`enable_return_routed_experts`), as rows of `Chunk.experts`.

SGLang tells a request's rows once, with its last output, also where the request was ended by us. So a sample whose
experts are wanted arrives in one chunk for each of its requests.
"""

import base64
from typing import Any

import numpy as np
import torch

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts
from headway.rollout_workers.engines.routed_layers import RoutedLayers

OPTION = "enable_return_routed_experts"
START = "routed_experts_start_len"


def can_pin() -> bool:
    """Return whether this machine has pinned memory, in which SGLang keeps the rows."""
    return torch.cuda.is_available()


def engine_arguments() -> dict[str, Any]:
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


def asking(first: int) -> dict[str, Any]:
    """Return the arguments of a request for the rows from the token at `first` on."""
    return {"return_routed_experts": True, START: first}


def told(output: Any, routed: RoutedLayers, layers: int, count: int) -> Experts | None:
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

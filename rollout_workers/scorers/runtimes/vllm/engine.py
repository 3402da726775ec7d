"""vLLM in the scorer's own process, which answers a batch of prompts at a time."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class BatchEngine:
    """Runs `LLMEngine` until it has answered a batch."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def answers(self, prompts: Sequence[NDArray[np.int32]], params: Sequence[Any]) -> list[Any]:
        """Return vLLM's output for each prompt. What it raises leaves no request behind."""
        names = [str(next(self._numbers)) for _ in prompts]
        found = dict[str, Any]()
        try:
            for name, prompt, own in zip(names, prompts, params, strict=True):
                self._engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, own)
            while self._engine.has_unfinished_requests():
                found |= {output.request_id: output for output in self._engine.step() if output.finished}
        except BaseException:
            self._engine.abort_request(names)
            raise
        return [found[name] for name in names]

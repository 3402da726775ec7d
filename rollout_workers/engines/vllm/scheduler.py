"""Holds tokens back in vLLM's core, which imports this module, until there are several of a request.

vLLM's core sends the front end a message of each token of each request: three small arrays, which cost both of them
more time than a small model's token costs a GPU. `stream_interval` acts only after that. Here it acts before: a
request's first token goes out at once, then each `stream_interval` tokens together, and the last ones with the end.
"""

from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

HELD = ("request_id", "new_token_ids", "new_logprobs")
REST = tuple(
    (field.name, field.default) for field in msgspec.structs.fields(EngineCoreOutput) if field.name not in HELD
)
"""The fields of an output besides tokens and their logprobs. One that says anything there goes out at once."""
MESSAGES = ("finished_requests", "scheduler_stats", "utility_output", "wave_complete", "start_wave")
"""The fields of a core's message besides its outputs."""


class TokenBuffering:
    """Makes a scheduler of vLLM hold tokens back. A paused one holds none: vLLM answers the call that pauses it after
    the last tokens."""

    scheduler_config: Any
    requests: dict[str, Any]
    pause_state: PauseState

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: dict[str, list[EngineCoreOutput]] = {}
        """The outputs that are held, by request."""

    def has_requests(self) -> bool:
        """Also True until a paused scheduler has let go of everything: the core then makes an empty step."""
        return bool(super().has_requests() or (self._held and self._is_paused()))  # type: ignore[misc]

    def update_from_output(self, *step: Any) -> dict[int, EngineCoreOutputs]:
        """Return vLLM's messages to its clients without the tokens that are held, and with those let go."""
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(*step)  # type: ignore[misc]
        for client, message in list(messages.items()):
            if not message.outputs:
                continue
            message.outputs = [output for one in message.outputs if (output := self._taken(one))]
            if not message.outputs and not any(getattr(message, name, None) for name in MESSAGES):
                del messages[client]
        if self._is_paused():
            for name in list(self._held):
                self._let_go(name, messages)
        return messages

    def finish_requests(self, *which: Any, **options: Any) -> Any:
        """Forget the tokens of requests that are aborted, which no client waits for."""
        finished = super().finish_requests(*which, **options)  # type: ignore[misc]
        for name in self._held.keys() - self.requests.keys():
            del self._held[name]
        return finished

    def _is_paused(self) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)

    def _taken(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return the output with those that were held before it; None if it is held, too."""
        name, held = output.request_id, self._held.get(output.request_id)
        if says_more(output):
            if held:
                del self._held[name]
                return together([*held, output])
            return output
        if held is None:
            held = self._held[name] = []
        held.append(output)
        if sum(len(one.new_token_ids) for one in held) < self.scheduler_config.stream_interval:
            return None
        del self._held[name]
        return together(held)

    def _let_go(self, name: str, messages: dict[int, EngineCoreOutputs]) -> None:
        held, request = self._held.pop(name), self.requests.get(name)
        if request is None:
            return
        message = messages.get(request.client_index)
        if message is None:
            message = messages[request.client_index] = EngineCoreOutputs(outputs=[])
        message.outputs.append(together(held))


class BufferingScheduler(TokenBuffering, Scheduler):
    """A scheduler of steps one after the other."""


class AsyncBufferingScheduler(TokenBuffering, AsyncScheduler):
    """A scheduler that prepares a step while the one before it is computed."""


def scheduler(vllm_config: Any, **options: Any) -> TokenBuffering:
    """Return the scheduler that vLLM would choose, which holds tokens back (`scheduler_cls`)."""
    kind = AsyncBufferingScheduler if vllm_config.scheduler_config.async_scheduling else BufferingScheduler
    return kind(vllm_config=vllm_config, **options)


def says_more(output: EngineCoreOutput) -> bool:
    """Whether an output says more than tokens and their logprobs."""
    return any(getattr(output, name) is not default for name, default in REST)


def together(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last of a request's outputs with the tokens and logprobs of all."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if logprobs:
            columns = zip(*logprobs, strict=True)
            last.new_logprobs = type(logprobs[0])(
                *(None if column[0] is None else np.concatenate(column) for column in columns)
            )
    return last

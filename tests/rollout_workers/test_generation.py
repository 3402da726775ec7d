# mypy: disable-error-code="arg-type"
"""A sample through several requests: interrupted, continued, finished without the engine; and streams that lie."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headway.broker.schema import VersionSpan, WeightVersion
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.samples import generation
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import EngineOutputError, Recorder

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)
STOP = 9


def chunk(tokens: list[int], version: WeightVersion = V1, finish: Any = None) -> Chunk:
    return Chunk(token_ids=tokens, logprobs=[-float(t) for t in tokens], version=version, finish_reason=finish)


class Scripted:
    """Answers each request with the next list of chunks, and keeps the requests."""

    capacity = 1
    max_model_len = 100

    def __init__(self, *answers: Sequence[Chunk]) -> None:
        self._answers = list(answers)
        self.asked: list[GenerationRequest] = []
        self.open = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.asked.append(request)
        self.open += 1
        try:
            for one in self._answers.pop(0):
                yield one
        finally:
            self.open -= 1


def request(**changes: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"prompt_tokens": [5, 6], "max_new_tokens": 8, "temperature": 1.0} | changes
    return GenerationRequest(request_id="r", **{"stop_token_ids": [STOP]} | settings)


def recorded(*tokens: int) -> Recorder:
    recorder = Recorder()
    recorder.add(chunk(list(tokens)))
    return recorder


async def test_an_interrupted_request_is_gone_on_with() -> None:
    engine = Scripted(
        [chunk([1, 2], finish="interrupted")],
        [chunk([3]), chunk([], V2, "interrupted")],
        [chunk([4], V2), chunk([STOP], V2, "stop")],
    )
    recorder, counts = Recorder(), list[int]()
    await generate(engine, request(seed=7), recorder, counts.append)
    assert (recorder.tokens, recorder.logprobs) == ([1, 2, 3, 4, STOP], [-1, -2, -3, -4, -STOP])
    assert recorder.spans == [VersionSpan(0, 3, V1), VersionSpan(3, 5, V2)]
    assert recorder.finished() == "stop"
    assert sum(counts) == 5
    assert [one.prompt_tokens for one in engine.asked] == [[5, 6], [5, 6, 1, 2], [5, 6, 1, 2, 3]]
    assert [one.max_new_tokens for one in engine.asked] == [8, 6, 5]
    assert len({one.request_id for one in engine.asked}) == len({one.seed for one in engine.asked}) == 3


@pytest.mark.parametrize(
    ("tokens", "changes", "reason"),
    [
        ([1, STOP], {}, "stop"),
        ([1, 2], {"max_new_tokens": 2}, "length"),
        ([1] * 4, {"prompt_tokens": [5] * 96}, "length"),
    ],
)
async def test_what_has_ended_needs_no_engine(tokens: list[int], changes: dict[str, object], reason: str) -> None:
    engine = Scripted()
    recorder = recorded(*tokens)
    await generate(engine, request(**changes), recorder)
    assert (engine.asked, recorder.tokens, recorder.finished()) == ([], tokens, reason)


async def test_an_interruption_after_the_last_token_asks_for_no_more() -> None:
    engine = Scripted([chunk([1, STOP], finish="interrupted")])
    recorder = Recorder()
    await generate(engine, request(), recorder)
    assert recorder.finished() == "stop"


async def test_an_engine_that_never_gets_to_a_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PAUSE_S", 0)
    monkeypatch.setattr(generation, "MOST_EMPTY_REQUESTS", 3)
    engine = Scripted([chunk([1], finish="interrupted")], *[[chunk([], finish="interrupted")]] * 4)
    with pytest.raises(EngineOutputError, match="interrupted 4 requests in a row"):
        await generate(engine, request(), Recorder())


@pytest.mark.parametrize("chunks", [[], [chunk([1, 2])], [chunk([], finish="stop")]])
async def test_a_stream_without_tokens_or_finish_is_refused(chunks: list[Chunk]) -> None:
    with pytest.raises(EngineOutputError, match="needs a token and a last chunk"):
        await generate(Scripted(chunks), request(), Recorder())


async def test_a_refused_chunk_closes_the_stream() -> None:
    engine = Scripted([chunk([1], V2), chunk([1], V1)])
    with pytest.raises(EngineOutputError, match="went back"):
        await generate(engine, request(), Recorder())
    assert engine.open == 0

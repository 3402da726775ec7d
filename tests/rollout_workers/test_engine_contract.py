# mypy: disable-error-code="arg-type, attr-defined, operator, type-var"
"""Every engine keeps these promises, compared with a plain transformers forward; a user's own engine keeps them too."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from headway.broker.errors import HeadwayError, WeightSyncError
from headway.broker.schema import VersionSpan, WeightVersion
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import abilities_of, open_engine
from headway.rollout_workers.engines.base import Engine, NamedTensors
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder
from tests import plugged
from tests.processes import children_left

from .closeness import Closeness
from .generation import (
    PROMPTS,
    Response,
    begin,
    difference,
    hold,
    hold_in_parts,
    in_parts,
    request,
    resume,
    run,
    run_all,
)
from .marks import SGLANG, VLLM
from .mixture import mixture_difference
from .models import STOP, Architecture, forward_logprobs, make_model, named_tensors, save_config
from .sglang_settings import sglang_config, sglang_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPACITY = 8
MAX_LEN = 512
ON_GPU = {"gpu_memory_utilization": 0.4} if torch.cuda.is_available() else {}
"""Options of vLLM on a GPU, where one test has two engines at once."""


@dataclass
class Case:
    """An engine and the models whose weights it is given."""

    kind: str
    engine: Engine
    directory: Path
    old: PreTrainedModel
    new: PreTrainedModel

    @property
    def close(self) -> Closeness:
        return Closeness.of(self.old)


def configured(kind: str) -> EngineConfig:
    if kind == "sglang":
        return sglang_config(CAPACITY, MAX_LEN)
    options = ON_GPU if kind == "vllm" else {}
    return EngineConfig(kind=kind, max_concurrent=CAPACITY, max_model_len=MAX_LEN, options=options)


def opened(kind: str, directory: Path) -> Engine:
    return open_engine(configured(kind), directory, seed=0, roots=roots_of(kind))


def roots_of(kind: str) -> ImportRoots:
    return ImportRoots((kind,) if ":" in kind else ())


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        ("embedded", "dense"),
        ("embedded", "moe"),
        (plugged.ENGINE, "dense"),
        pytest.param(
            ("vllm", "dense"), marks=[mark for mark in VLLM if mark.name != "slow"]
        ),  # `make test` starts it here
        pytest.param(("vllm", "moe"), marks=VLLM),
        pytest.param(("sglang", "dense"), marks=SGLANG),
        pytest.param(("sglang", "moe"), marks=SGLANG),
    ],
    ids="-".join,
)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    architecture: Architecture
    kind, architecture = request.param
    make = sglang_model if kind == "sglang" else make_model
    old, new = make(architecture, 0), make(architecture, 1)
    directory = save_config(old, tmp_path_factory.mktemp(architecture))
    threads = torch.get_num_threads()
    if kind == plugged.ENGINE:
        torch.set_num_threads(1)  # its many small forwards would wait for other processes' threads
    with pytest.MonkeyPatch.context() as patch:
        plugged.write(directory)
        patch.syspath_prepend(directory)
        patch.delitem(sys.modules, "plugged", raising=False)
        engine = opened(kind, directory)
        yield Case(kind, engine, directory, old, new)
        await engine.close()
    torch.set_num_threads(threads)


async def test_no_tokens_before_the_first_weights(case: Case) -> None:
    with pytest.raises(HeadwayError, match="swap_weights"):
        await run(case.engine, request([2]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_forward(case: Case, temperature: float) -> None:
    version = await hold(case.engine, case.old)
    responses = await run_all(case.engine, PROMPTS * 2, temperature=temperature)
    for response in responses:
        assert case.close.off(difference(case.old, response, temperature)) < case.close.tolerance
        assert set(response.versions) == {version}
    assert max(len(response.tokens) for response in responses) > 10


async def test_score_is_that_of_a_forward(case: Case) -> None:
    await hold(case.engine, case.old)
    scores = await case.engine.score(PROMPTS[3])
    expected = forward_logprobs(case.old, PROMPTS[3][:1], PROMPTS[3][1:])
    assert case.close.off((torch.tensor(scores) - expected).abs()) < case.close.tolerance


async def test_samples_run_together_as_they_run_alone(case: Case) -> None:
    await hold(case.engine, case.old)
    alone = [await run(case.engine, request(prompt, stop_token_ids=[])) for prompt in PROMPTS]
    together = await run_all(case.engine, PROMPTS * 3, stop_token_ids=[])
    for response, expected in zip(together, alone * 3, strict=True):
        case.close.check_same(response, expected)


async def test_stop_token_and_length_end_a_sample(case: Case) -> None:
    await hold(case.engine, case.old)
    free = await run(case.engine, request(PROMPTS[0], stop_token_ids=[], max_new_tokens=7))
    assert (free.finish_reason, len(free.tokens)) == ("length", 7)
    stop = free.tokens[3]
    stopped = await run(case.engine, request(PROMPTS[0], stop_token_ids=[STOP, stop]))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    at_the_end = await run(case.engine, request([2] * (MAX_LEN - 5), stop_token_ids=[], max_new_tokens=100))
    assert (at_the_end.finish_reason, len(at_the_end.tokens)) == ("length", 5)


async def test_a_resumed_sample_is_that_of_one_request(case: Case) -> None:
    version = await hold(case.engine, case.old)
    asked = [request(prompt, stop_token_ids=[]) for prompt in PROMPTS]
    whole = await asyncio.gather(*[run(case.engine, one) for one in asked])
    cuts = [1, 5, 10, 17, 23, 24]  # the last has nothing left to generate
    resumed = await asyncio.gather(*[resume(case.engine, *one) for one in zip(asked, whole, cuts, strict=True)])
    for response, expected in zip(resumed, whole, strict=True):
        case.close.check_same(response, expected)
        assert (response.versions, response.finish_reason) == ([version] * 24, "length")


async def test_a_sample_resumed_under_newer_weights_names_both(case: Case) -> None:
    old_version = await hold(case.engine, case.old)
    asked = request(PROMPTS[3], temperature=0.7, stop_token_ids=[])
    whole = await run(case.engine, asked)
    new_version = await hold(case.engine, case.new)
    response = await resume(case.engine, asked, whole, 9)
    assert response.tokens[:9] == whole.tokens[:9]
    assert response.versions == [old_version] * 9 + [new_version] * 15
    assert case.close.off(difference(case.old, response, 0.7)[:9]) < case.close.tolerance
    assert case.close.off(difference(case.new, response, 0.7)[9:]) < case.close.tolerance


async def test_after_a_swap_it_is_a_fresh_engine(case: Case) -> None:
    if (case.kind, case.old.config.model_type) == ("vllm", "qwen3"):
        pytest.skip("one more start of vLLM shows it for experts, which are the harder case")
    await hold(case.engine, case.old)
    before = await run_all(case.engine, PROMPTS)
    await hold(case.engine, case.new)
    after = await run_all(case.engine, PROMPTS)
    fresh = opened(case.kind, case.directory)
    try:
        await hold(fresh, case.new)
        expected = await run_all(fresh, PROMPTS)
    finally:
        await fresh.close()
    for response, wanted in zip(after, expected, strict=True):
        case.close.check_same(response, wanted)
    assert [response.tokens for response in after] != [response.tokens for response in before]


async def test_a_swap_in_flight_drops_nothing_and_spans_are_exact(case: Case) -> None:
    old_version = await hold(case.engine, case.old)
    responses, running = await begin(case.engine, PROMPTS)
    new_version = await hold(case.engine, case.new)
    await asyncio.gather(*running)
    for response in responses:
        assert (response.finish_reason, len(response.tokens)) == ("length", 200)
        switch = response.versions.index(new_version)
        assert response.versions == [old_version] * switch + [new_version] * (200 - switch)
        from_old, from_new = difference(case.old, response), difference(case.new, response)
        assert case.close.off(from_old[:switch]) < case.close.tolerance
        assert case.close.off(from_new[switch:]) < case.close.tolerance
        assert case.close.off(from_old[switch:]) > 0.1 + case.close.tolerance


async def test_weights_in_parts_that_fail_once_stop_it_until_a_whole_version_is_there(case: Case) -> None:
    old_version = await hold(case.engine, case.old)
    responses, running = await begin(case.engine, PROMPTS)
    with pytest.raises(WeightSyncError, match="cut off"):  # the engine loaded no part of it
        await case.engine.swap_in_parts(WeightVersion(2, 0), in_parts(case.new, until=0))
    counted = sum(len(response.tokens) for response in responses)
    async with asyncio.timeout(240):
        while sum(len(response.tokens) for response in responses) == counted:  # noqa: ASYNC110 - the engine announces nothing
            await asyncio.sleep(0.01)
    with pytest.raises(WeightSyncError, match="cut off"):
        await case.engine.swap_in_parts(WeightVersion(2, 0), in_parts(case.new, until=2))
    await asyncio.sleep(0.1)  # earlier tokens are on their way
    counted = sum(len(response.tokens) for response in responses)
    await asyncio.sleep(0.3)
    assert sum(len(response.tokens) for response in responses) == counted
    new_version = await hold_in_parts(case.engine, case.new)
    await asyncio.gather(*running)
    for response in responses:
        assert (response.finish_reason, len(response.tokens)) == ("length", 200)
        switch = response.versions.index(new_version)
        assert response.versions == [old_version] * switch + [new_version] * (200 - switch)
        assert case.close.off(difference(case.old, response)[:switch]) < case.close.tolerance
        assert case.close.off(difference(case.new, response)[switch:]) < case.close.tolerance


async def test_parts_without_a_tensor_are_no_version(case: Case) -> None:
    await hold(case.engine, case.old)

    async def but_one() -> AsyncIterator[NamedTensors]:
        yield named_tensors(case.new)[1:]

    with pytest.raises(WeightSyncError, match=r"did not come|were sent"):
        await case.engine.swap_in_parts(WeightVersion(2, 0), but_one())
    await hold(case.engine, case.new)


async def test_a_swap_that_keeps_the_cache_goes_on_over_it_and_spans_are_exact(case: Case) -> None:
    if case.kind == plugged.ENGINE:
        pytest.skip("it has no cache to keep")
    old_version = await hold(case.engine, case.old)
    responses, running = await begin(case.engine, PROMPTS[2:4])
    new_version = await hold(case.engine, case.new, keep_cache=True)
    await asyncio.gather(*running)
    for response in responses:
        assert (response.finish_reason, len(response.tokens)) == ("length", 200)
        switch = response.versions.index(new_version)
        assert response.versions == [old_version] * switch + [new_version] * (200 - switch)
        assert case.close.off(difference(case.old, response)[:switch]) < case.close.tolerance
        assert case.close.off(mixture_difference(case.old, case.new, response, switch)) < case.close.tolerance
        assert case.close.off(difference(case.new, response)[switch:]) > case.close.apart


async def test_what_begins_after_a_swap_uses_nothing_that_older_weights_cached(case: Case) -> None:
    await hold(case.engine, case.old)
    # Long enough for blocks of a prefix cache; one sample runs on, so that its cache is kept.
    prompts = [[2 + (i * j) % 60 for i in range(300)] for j in (3, 7)]
    before = await run_all(case.engine, prompts, stop_token_ids=[], max_new_tokens=8)
    running = Response(prompts[0])
    asked = request(prompts[0], stop_token_ids=[], max_new_tokens=100)
    task = asyncio.create_task(run(case.engine, asked, response=running))
    await running.started.wait()
    version = await hold(case.engine, case.new, keep_cache=True)
    after = await run_all(
        case.engine, [*prompts, before[0].prompt + before[0].tokens], stop_token_ids=[], max_new_tokens=8
    )
    await task
    for response in after:
        assert set(response.versions) == {version}
        assert case.close.off(difference(case.new, response)) < case.close.tolerance
    await hold(case.engine, case.new)  # the engine forgets everything, as a fresh one
    fresh = await run_all(case.engine, [response.prompt for response in after], stop_token_ids=[], max_new_tokens=8)
    for response, expected in zip(after, fresh, strict=True):
        case.close.check_same(response, expected)


async def test_a_group_computes_its_prompt_once_under_each_version(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.kind != "vllm":
        pytest.skip("it reads how many of a request's tokens vLLM found in its cache")
    outputs, cached = case.engine._outputs, dict[str, int]()

    async def watched(request_id: str, *others: object) -> AsyncIterator[object]:
        async for found in outputs(request_id, *others):
            cached.setdefault(request_id, found[0].num_cached_tokens)
            yield found

    monkeypatch.setattr(case.engine, "_outputs", watched)
    block = case.engine._llm.vllm_config.cache_config.block_size
    prompt = [2 + (i * 5) % 60 for i in range(300)]
    for keep_cache in (False, True):
        await hold(case.engine, case.old, keep_cache=keep_cache)
        cached.clear()
        await run_all(case.engine, [prompt] * 4, max_new_tokens=2)
        assert sorted(cached.values()) == [0, *[len(prompt) // block * block] * 3]


async def test_a_slow_reader_gets_exact_spans(case: Case) -> None:
    """The engine still tells apart chunks that piled up over a swap."""
    if case.kind == plugged.ENGINE:
        pytest.skip("it samples a token as it is read, so that nothing piles up")
    await hold(case.engine, case.old)
    other = request(PROMPTS[1], stop_token_ids=[], max_new_tokens=20)
    response = Response(PROMPTS[0])
    async with aclosing(
        case.engine.generate(request(PROMPTS[0], temperature=1.0, stop_token_ids=[], max_new_tokens=400))
    ) as chunks:
        response.add(await anext(chunks))
        await run(case.engine, other)
        await hold(case.engine, case.new)
        await run(case.engine, request(PROMPTS[1], stop_token_ids=[], max_new_tokens=20))
        async for chunk in chunks:
            response.add(chunk)
    switch = response.versions.index(response.versions[-1])
    assert 10 < switch < 390
    assert len(set(response.versions)) == 2
    assert case.close.off(difference(case.old, response)[:switch]) < case.close.tolerance
    assert case.close.off(difference(case.new, response)[switch:]) < case.close.tolerance


async def test_closing_the_iterator_frees_its_place(case: Case) -> None:
    await hold(case.engine, case.old)
    long = {"stop_token_ids": [], "max_new_tokens": MAX_LEN}
    others = [asyncio.create_task(run(case.engine, request([i + 2], **long))) for i in range(CAPACITY - 1)]
    async with aclosing(case.engine.generate(request([30], **long))) as chunks:
        await anext(chunks)
    short = await run(case.engine, request([31], stop_token_ids=[], max_new_tokens=4))
    assert len(short.tokens) == 4
    assert not any(other.done() for other in others)
    for other in others:
        other.cancel()
    ends = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_requests_that_vllm_gives_up_are_gone_on_with(case: Case) -> None:
    if case.kind != "vllm":
        pytest.skip("no other engine gives a request up")
    version = await hold(case.engine, case.old)
    asked = [request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=200) for prompt in PROMPTS]
    recorders = [Recorder() for _ in asked]
    counted = asyncio.Event()
    running = [
        asyncio.create_task(generate(case.engine, one, recorder, lambda _: counted.set()))
        for one, recorder in zip(asked, recorders, strict=True)
    ]
    await counted.wait()
    await case.engine._llm.pause_generation(mode="abort", clear_cache=True)
    reasons = [recorder.finish_reason for recorder in recorders]
    await case.engine._llm.resume_generation()
    await asyncio.gather(*running)
    assert reasons == [None] * len(asked)
    for one, recorder in zip(asked, recorders, strict=True):
        response = Response(one.prompt_tokens, recorder.tokens, recorder.logprobs)
        assert (len(recorder.tokens), recorder.finished()) == (200, "length")
        assert recorder.spans == [VersionSpan(0, 200, version)]
        assert case.close.off(difference(case.old, response)) < case.close.tolerance


async def test_wrong_tensors_are_refused_and_the_old_weights_stay(case: Case) -> None:
    await hold(case.engine, case.old)
    before = await run(case.engine, request(PROMPTS[0]))
    tensors = named_tensors(case.new)
    name, tensor = tensors[3]
    for wrong, complaint in [
        ([*tensors, ("model.nonsense.weight", tensor)], "model.nonsense.weight"),
        ([*tensors[:3], (name, torch.cat([tensor, tensor])), *tensors[4:]], name),
        ([*tensors[:3], *tensors[4:]], name),
    ]:
        with pytest.raises(WeightSyncError, match=complaint):
            await case.engine.swap_weights(WeightVersion(9, 9), wrong)
    after = await run(case.engine, request(PROMPTS[0]))
    assert (after.tokens, after.versions) == (before.tokens, before.versions)


async def test_tensors_that_fail_a_check_sample_nothing(case: Case) -> None:
    """Waiting requests go on with the tensors of a later swap, whose version need not be newer."""
    old_version = await hold(case.engine, case.old)
    asked = request(PROMPTS[0], temperature=1.0, stop_token_ids=[], max_new_tokens=200)
    response, seen = Response(PROMPTS[0]), list[object]()
    running = asyncio.create_task(run(case.engine, asked, response=response))
    await response.started.wait()

    def refuse(held: object) -> None:
        seen.append(held)
        raise WeightSyncError("not what was published")

    for attempt in range(2):
        with pytest.raises(WeightSyncError, match="not what was published"):
            await hold(case.engine, case.new, check=refuse)
        assert len(seen) == attempt + 1
    later = asyncio.create_task(run(case.engine, request(PROMPTS[1], max_new_tokens=4)))
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in (running, later))
    new_version = await hold(case.engine, case.new, check=seen.append)
    await asyncio.gather(running, later)
    switch = response.versions.index(new_version)
    assert response.versions == [old_version] * switch + [new_version] * (200 - switch)
    assert case.close.off(difference(case.old, response)[:switch]) < case.close.tolerance
    assert case.close.off(difference(case.new, response)[switch:]) < case.close.tolerance
    assert set(later.result().versions) == {new_version}


async def test_prompts_that_cannot_be_are_refused(case: Case) -> None:
    await hold(case.engine, case.old)
    for prompt, complaint in [([2] * MAX_LEN, "max_model_len"), ([], "0 tokens"), ([99999], "tokenizer")]:
        with pytest.raises(HeadwayError, match=complaint):
            await run(case.engine, request(prompt))


async def test_after_a_sleep_it_is_a_fresh_engine(case: Case) -> None:
    if (case.kind, case.old.config.model_type) == ("vllm", "qwen3"):
        pytest.skip("on a CPU vLLM's sleep keeps everything; once shows that the calls are right")
    if not abilities_of(configured(case.kind), roots_of(case.kind)).sleeps:
        pytest.skip("it states that it does not sleep")
    await hold(case.engine, case.old)
    before = await run_all(case.engine, PROMPTS)
    for _ in range(2):
        await case.engine.sleep()
        with pytest.raises(HeadwayError, match="swap_weights"):
            await run(case.engine, request([2]))
        await case.engine.wake()
        with pytest.raises(HeadwayError, match="swap_weights"):
            await run(case.engine, request([2]))
        version = await hold(case.engine, case.old)
    after = await run_all(case.engine, PROMPTS)
    for response, expected in zip(after, before, strict=True):
        assert set(response.versions) == {version}
        case.close.check_same(response, expected)


async def test_closing_ends_those_who_wait(case: Case) -> None:
    """The test is the last one of its engine."""
    await hold(case.engine, case.old)
    waiting = Response(PROMPTS[0])
    asked = request(PROMPTS[0], stop_token_ids=[], max_new_tokens=MAX_LEN)
    task = asyncio.create_task(run(case.engine, asked, response=waiting))
    async with asyncio.timeout(240):  # it never starts in an engine that is closed already, as in a second try
        await waiting.started.wait()
    await case.engine.close()
    await case.engine.close()
    with pytest.raises(HeadwayError, match="closed"):
        await task
    with pytest.raises(HeadwayError, match="closed"):
        await run(case.engine, request(PROMPTS[0]))
    assert children_left() == []
    assert "headway-engine" not in [thread.name for thread in threading.enumerate()]

"""Adapters swapped in flight into one engine, beside whole weights into another: exactness, bytes and seconds.

    python -m benchmarks.adapter_sync [--engine vllm|sglang] [--device cuda|cpu] [--width 2048] [--layers 16]
        [--rank 16] [--requests 64] [--tokens 256] [--swaps 3] [--limit-s 400] [--kinds adapter,finish,whole]
        [--options JSON]

A random dense Qwen3 in `--dtype`. Each swap falls into running requests. `before` and `after` are mean differences
between the engine's logprobs and transformers' for the tokens that a version sampled, under the merged model of that
version; `other` is the same under the version before, so that a token of the wrong version would show. `prepared` has
the seconds of loading the base. An adapter that lacks a tensor, and one that is loaded and that requests do not name,
must be refused: `refused`. `finish` is an engine with places for two adapters: running samples finish with theirs, so
no token is `after`. The last line is one JSON object; what is known before it goes to the standard error.
"""

import argparse
import asyncio
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import GenerationRequest, NamedTensors
from headway.rollout_workers.weight_updates.verification import refuse_other_logprobs, refuse_other_tensors
from headway.weightsync.tensors.fingerprint import fingerprint

KINDS = ("adapter", "finish", "whole")
SCALE = 2.0
PROMPT_TOKENS = 32
MEASURED = 16
"""Requests whose logprobs are compared."""
ON_GPU: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "cuda_graph_bs_decode": [1, 8, 16, 32, 64],
    "mem_fraction_static": 0.9,
}
"""Options of SGLang on a GPU, which need none of its fast kernels. How much it takes is said in tokens besides."""
NAMES = {
    "vllm": "headway.rollout_workers.engines.vllm.engine.adapter_request",
    "sglang": "headway.rollout_workers.engines.sglang.requests.adapter_name",
}
"""Import paths of what an engine that holds several adapters names a request's by."""
SIZE = 0.03
"""The standard deviation of A and B: an adapter changes a token's logprob by units."""


class Study:
    """One engine of each kind in turn, the base, and the adapters."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._dtype = getattr(torch, options.dtype)
        self._directory = directory
        torch.manual_seed(0)
        head = min(128, options.width // 4)
        config = Qwen3Config(
            vocab_size=options.vocabulary,
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // head,
            num_key_value_heads=max(1, options.width // head // 2),
            head_dim=head,
            tie_word_embeddings=False,
            initializer_range=0.05,
            eos_token_id=1,
            pad_token_id=0,
        )
        config.save_pretrained(directory)
        self._model = Qwen3ForCausalLM(config).to(self._dtype).to(options.device).eval().requires_grad_(False)
        self._base = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}

    def adapter(self, number: int) -> NamedTensors:
        """Return the adapter of a version, of all linear layers of the decoder."""
        generator, found = torch.Generator().manual_seed(number), []
        for name, weight in self._base.items():
            if name.endswith("_proj.weight"):
                rows, columns = weight.shape
                shapes = {"lora_A": (self._options.rank, columns), "lora_B": (rows, self._options.rank)}
                prefix = name.removesuffix("weight")
                for factor, shape in shapes.items():
                    drawn = SIZE * torch.randn(shape, generator=generator)
                    found.append((f"{prefix}{factor}", drawn.to(self._dtype).to(self._options.device)))
        return found

    def merged(self, number: int) -> PreTrainedModel:
        """Return the one model, with the weights of a version merged into it; 0: the base's."""
        factors = dict(self.adapter(number)) if number else {}
        for name, weight in self._model.named_parameters():
            change: torch.Tensor | float = 0.0
            if (first := f"{name.removesuffix('weight')}lora_A") in factors:
                second = factors[f"{first[:-1]}B"]
                change = SCALE * (second.float() @ factors[first].float())
            weight.data.copy_(self._base[name].float() + change)
        return self._model

    def whole(self, number: int) -> NamedTensors:
        """Return all weights of a version."""
        return [(name, tensor.detach().clone()) for name, tensor in self.merged(number).named_parameters()]

    def logprobs(self, number: int, sequences: Iterable[list[int]]) -> list[list[float]]:
        """Return the logprobs of each sequence's tokens but the first, under a version."""
        model, found = self.merged(number), []
        for tokens in sequences:
            ids = torch.tensor([tokens], device=self._options.device)
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
        return found

    def probe(self, number: int) -> Probe:
        tokens = list(range(2, 2 + PROMPT_TOKENS))
        tolerance = 2e-3 if self._dtype is torch.float32 else 0.25
        return Probe(token_ids=tokens, logprobs=self.logprobs(number, [tokens])[0], tolerance=tolerance)

    def _room(self) -> dict[str, Any]:
        """Return options with the size of the engine's cache on a GPU, twice what the requests need: vLLM then measures
        no memory, which other processes may take or free meanwhile."""
        model, options = self._model.config, self._options
        keys_and_values = (
            2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * self._dtype.itemsize
        )
        tokens = 2 * (options.requests + 1) * (PROMPT_TOKENS + options.tokens + 1)
        if options.device != "cuda" or options.engine == "embedded":
            return {}
        if options.engine == "sglang":
            return {**ON_GPU, "max_total_tokens": tokens}
        return {"kv_cache_memory_bytes": tokens * keys_and_values, "gpu_memory_utilization": 0.05}

    async def run(self, *, has_adapters: bool, held: int = 1) -> dict[str, Any]:
        """Open an engine, and swap versions 1, 2, ... into running requests."""
        options = self._options
        config = EngineConfig(
            kind=options.engine,
            max_concurrent=options.requests,
            max_model_len=PROMPT_TOKENS + options.tokens + 1,
            dtype=options.dtype,
            device=options.device,
            options=self._room() | options.options,
        )
        rank = options.rank if has_adapters else 0
        engine: Any = open_engine(config, self._directory, seed=0, adapter_rank=rank, adapters_held=held)
        try:
            print(f"the engine has started, {sys.argv[1:]}", file=sys.stderr, flush=True)
            started = time.monotonic()
            if has_adapters:
                await engine.load_base(self.whole(0))
            prepared = time.monotonic() - started
            await self._swap(engine, 1, has_adapters)
            swaps = [await self._in_flight(engine, number, has_adapters) for number in range(2, 2 + options.swaps)]
            found = {"prepared_s": round(prepared, 3), "swaps": swaps}
            return {**found, "refused": await self._faults(engine)} if has_adapters else found
        finally:
            await engine.close()

    async def _swap(self, engine: Any, number: int, has_adapters: bool) -> dict[str, float]:
        version, tensors = WeightVersion(1, number), self.adapter(number) if has_adapters else self.whole(number)
        given = on_host(tensors)
        check = functools.partial(refuse_other_tensors, manifest(version, tensors)) if has_adapters else None
        started = time.monotonic()
        if has_adapters:
            await engine.swap_adapter(version, given, SCALE, check=check)
        else:
            await engine.swap_weights(version, given)
        seconds = time.monotonic() - started
        probe = self.probe(number)
        scores = await engine.score(probe.token_ids)
        difference = math.fsum(abs(a - b) for a, b in zip(scores, probe.logprobs, strict=True)) / len(scores)
        refuse_other_logprobs(probe, scores, version)
        return {"bytes": sum(tensor.nbytes for _, tensor in tensors), "seconds": round(seconds, 4), "probe": difference}

    async def _in_flight(self, engine: Any, number: int, has_adapters: bool) -> dict[str, float]:
        """Swap a version in while requests run; return its cost, and the differences of what was sampled."""
        options, streams = self._options, []
        for index in range(options.requests):
            prompt = [2 + (7 * index + 13 * place) % (options.vocabulary - 2) for place in range(PROMPT_TOKENS)]
            streams.append(
                asyncio.create_task(generated(engine, f"{has_adapters}-{number}-{index}", prompt, options.tokens))
            )
        await asyncio.sleep(options.pause_s)
        cost = await self._swap(engine, number, has_adapters)
        sampled = await asyncio.gather(*streams)
        before, after, other = list[float](), list[float](), list[float]()
        sequences = [tokens for tokens, _, _ in sampled[:MEASURED]]
        by_version = (self.logprobs(one, sequences) for one in (number, number - 1))
        for (_, logprobs, versions), of_new, of_old in zip(sampled, *by_version, strict=False):
            of_each = (of_new[PROMPT_TOKENS - 1 :], of_old[PROMPT_TOKENS - 1 :])
            for logprob, version, new, old in zip(logprobs, versions, *of_each, strict=True):
                mine, theirs = (new, old) if version.step == number else (old, new)
                (after if version.step == number else before).append(abs(logprob - mine))
                other.append(abs(logprob - theirs))
        means = {"before": before, "after": after, "other": other}
        found = {name: round(math.fsum(one) / max(1, len(one)), 5) for name, one in means.items()}
        result = {**cost, **found, "tokens_before": len(before), "tokens_after": len(after)}
        print(json.dumps(result), file=sys.stderr, flush=True)
        return result

    async def _faults(self, engine: Any) -> dict[str, bool]:
        """Return which faults were refused."""
        last = 2 + self._options.swaps
        version, tensors = WeightVersion(1, last), self.adapter(last)
        check = functools.partial(refuse_other_tensors, manifest(version, tensors))
        refused = {}
        try:
            await engine.swap_adapter(version, on_host(tensors[2:]), SCALE, check=check)
        except WeightSyncError:
            refused["undelivered"] = True
        await engine.swap_adapter(version, on_host(tensors), SCALE, check=check)
        if self._options.engine in NAMES:
            probe = self.probe(last)
            with patch(NAMES[self._options.engine], lambda place: None):
                scores = await engine.score(probe.token_ids)
            try:
                refuse_other_logprobs(probe, scores, version)
            except WeightSyncError:
                refused["unused"] = True
        return refused


async def generated(
    engine: Any, name: str, prompt: list[int], count: int
) -> tuple[list[int], list[float], list[WeightVersion]]:
    """Return prompt and response, the response's logprobs, and the version of each of its tokens."""
    request = GenerationRequest(
        request_id=name, prompt_tokens=prompt, max_new_tokens=count, temperature=1.0, stop_token_ids=[], seed=1
    )
    tokens, logprobs, versions = [*prompt], list[float](), list[WeightVersion]()
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            versions += [chunk.version] * len(chunk.token_ids)
    return tokens, logprobs, versions


def manifest(version: WeightVersion, tensors: NamedTensors) -> WeightManifest:
    """Return what an engine is checked against."""
    return WeightManifest(
        version=version,
        tensors=tuple(TensorSpec(name, "", tuple(tensor.shape), 0, 0, tensor.nbytes) for name, tensor in tensors),
        buckets=(),
        probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
        group_epoch=0,
        pull_url="",
        pull_token="",
        fingerprints=tuple(fingerprint(tensor.cpu()) for _, tensor in tensors),
    )


def on_host(tensors: NamedTensors) -> NamedTensors:
    """Return the tensors in host memory, as `weights.staging=host` has them."""
    return [(name, tensor.cpu()) for name, tensor in tensors]


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        study = Study(options, Path(directory))
        with torch.no_grad():
            for kind in options.kinds:
                if kind == "finish" and options.engine not in NAMES:
                    continue
                found[kind] = await study.run(has_adapters=kind != "whole", held=2 if kind == "finish" else 1)
                print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def _kinds(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := set(asked) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return [kind for kind in KINDS if kind in asked]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang", "embedded"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--swaps", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.5, help="between the beginning of requests and the swap")
    parser.add_argument("--kinds", type=_kinds, default=KINDS, metavar="KIND,...", help=f"default: {','.join(KINDS)}")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more options of the engine")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(asyncio.wait_for(_measure(options), options.limit_s))))


if __name__ == "__main__":
    main()

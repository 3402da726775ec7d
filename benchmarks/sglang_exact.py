"""Is SGLang exact as an engine? Logprobs, spans over swaps in flight and caches, against transformers, as JSON.

    python -m benchmarks.sglang_exact [--tiny]

Random Qwen3 and Qwen3-MoE models in bfloat16 on one GPU, or in float32 on a CPU with `--tiny`. It needs no other
option. Each kind of model gets a process of its own, which ends within `--stage-s` seconds.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

KINDS = ("dense", "moe")
PROMPTS, NEW_TOKENS = 32, 256


@dataclass
class Answer:
    """One response, with the version of each token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    ending: str = ""


def make(kind: str, seed: int, *, tiny: bool) -> Any:
    """Return a random model in float32 on the CPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    width = 32 if tiny else 512
    shape = {
        "vocab_size": 64 if tiny else 8192,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2 if tiny else 4,
        "num_attention_heads": 4 if tiny else 8,
        "num_key_value_heads": 2 if tiny else 4,
        "head_dim": 32 if tiny else 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15 if tiny else 0.06,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).eval()


def config_of(*, tiny: bool, **options: Any) -> Any:
    """Return the configuration of the engine."""
    from headway.rollout_workers.config import EngineConfig

    if not tiny:
        options = {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.3,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32],
            "max_total_tokens": 65_536,
        } | options
    dtype: Any = "float32" if tiny else "bfloat16"
    return EngineConfig(kind="sglang", max_concurrent=PROMPTS, max_model_len=1024, dtype=dtype, options=options)


def prompts_of(model: Any, count: int) -> list[list[int]]:
    """Return prompts of different lengths."""
    vocabulary = model.config.vocab_size
    return [
        [3 + (7 * place * (number + 1)) % (vocabulary - 3) for place in range(30 + 5 * number)]
        for number in range(count)
    ]


async def answer(
    engine: Any, prompt: list[int], new_tokens: int, temperature: float, into: Answer | None = None
) -> Answer:
    """Generate one response."""
    from headway.rollout_workers.engines.base import GenerationRequest

    got = into or Answer(prompt)
    asked = GenerationRequest(
        request_id="r",
        prompt_tokens=prompt,
        max_new_tokens=new_tokens,
        temperature=temperature,
        stop_token_ids=[],
    )
    async with aclosing(engine.generate(asked)) as chunks:
        async for chunk in chunks:
            got.tokens += chunk.token_ids
            got.logprobs += chunk.logprobs
            got.versions += [chunk.version] * len(chunk.token_ids)
            got.ending = chunk.finish_reason or ""
    return got


def differences(model: Any, got: Answer, temperature: float, span: slice = slice(None)) -> Any:
    """Return [T], how far the logprobs are from a forward of transformers."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([got.prompt + got.tokens], device=model.device)
        logits = model(ids).logits[0, len(got.prompt) - 1 : -1].float() / temperature
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(got.tokens, device=model.device)[:, None])[:, 0].cpu()
    return (wanted - torch.tensor(got.logprobs)).abs()[span]


def summed(parts: list[Any]) -> dict[str, Any]:
    """Return mean, largest and number of differences."""
    import torch

    together = torch.cat(parts)
    if not len(together):
        return {"tokens": 0}
    mean, largest = float(together.mean()), float(together.max())
    return {"mean": round(mean, 6), "max": round(largest, 5), "tokens": len(together)}


class Checks:
    """The checks of one kind of model."""

    def __init__(self, kind: str, *, tiny: bool) -> None:
        import torch

        self.tiny, self.found = tiny, dict[str, Any]()
        self.models = [make(kind, seed, tiny=tiny) for seed in (0, 1)]
        self.on_gpu = torch.cuda.is_available() and not tiny
        if self.on_gpu:
            self.models = [model.to(torch.bfloat16).cuda() for model in self.models]
        self.new_tokens = 40 if tiny else NEW_TOKENS
        self.prompts = prompts_of(self.models[0], 6 if tiny else PROMPTS)
        self.step = 0

    async def hold(self, engine: Any, which: int) -> Any:
        """Swap a model's weights in; the check of its fingerprints must pass."""
        from headway.broker.schema import WeightVersion
        from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
        from headway.rollout_workers.weight_updates.verification import refuse_other_tensors
        from headway.weightsync.tensors.fingerprint import fingerprint

        tensors = [(name, one.detach()) for name, one in self.models[which].named_parameters()]
        self.step += 1
        version, begin = WeightVersion(1, self.step), time.monotonic()
        manifest = WeightManifest(
            version=version,
            tensors=tuple(TensorSpec(name, "", tuple(one.shape), 0, 0, one.nbytes) for name, one in tensors),
            buckets=(0,),
            probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
            group_epoch=0,
            pull_url="",
            pull_token="",
            fingerprints=tuple(fingerprint(one) for _, one in tensors),
        )

        def check(held: Any) -> None:
            self.found["fingerprints_known"] = held is not None
            refuse_other_tensors(manifest, held)

        await engine.swap_weights(version, tensors, check=check)
        self.found.setdefault("swap_s", []).append(round(time.monotonic() - begin, 4))
        return version

    async def steady(self, engine: Any, temperature: float) -> None:
        """Logprobs without a swap."""
        begin = time.monotonic()
        got = await asyncio.gather(*[answer(engine, one, self.new_tokens, temperature) for one in self.prompts])
        tokens = sum(len(one.tokens) for one in got)
        self.found[f"logprobs_at_{temperature}"] = summed(
            [differences(self.models[0], one, temperature) for one in got]
        ) | {"tokens_per_s": round(tokens / (time.monotonic() - begin))}

    async def swapped(self, engine: Any, temperature: float) -> None:
        """Spans of a swap in flight: before it the old model's tokens, after it the new one's, none lost."""
        old = await self.hold(engine, 0)
        got = [Answer(prompt) for prompt in self.prompts]
        running = [asyncio.create_task(answer(engine, one.prompt, self.new_tokens, temperature, one)) for one in got]
        while min(len(one.tokens) for one in got) < self.new_tokens // 6:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        new = await self.hold(engine, 1)
        await asyncio.gather(*running)
        cuts = [one.versions.index(new) for one in got]
        pairs = list(zip(got, cuts, strict=True))
        first, second = self.models
        self.found[f"swap_in_flight_at_{temperature}"] = {
            "whole": all(len(one.tokens) == self.new_tokens and one.ending == "length" for one in got),
            "one_switch_each": all(one.versions == [old] * cut + [new] * (self.new_tokens - cut) for one, cut in pairs),
            "before_as_old": summed([differences(first, one, temperature, slice(0, cut)) for one, cut in pairs]),
            "after_as_new": summed([differences(second, one, temperature, slice(cut, None)) for one, cut in pairs]),
            "after_as_old": summed([differences(first, one, temperature, slice(cut, None)) for one, cut in pairs]),
        }

    async def fresh(self, engine: Any) -> list[list[int]]:
        """Greedy answers to prompts that older weights have cached, under the second model."""
        await self.hold(engine, 0)
        await asyncio.gather(*[answer(engine, one, 8, 0.0) for one in self.prompts])
        await self.hold(engine, 1)
        got = await asyncio.gather(*[answer(engine, one, 16, 0.0) for one in self.prompts])
        self.found["prompts_that_older_weights_cached"] = summed([differences(self.models[1], one, 1.0) for one in got])
        return [one.tokens for one in got]


async def check(kind: str, *, tiny: bool) -> dict[str, Any]:
    """Run all checks of one kind of model."""
    from headway.rollout_workers.engines import open_engine

    checks, begin = Checks(kind, tiny=tiny), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        checks.models[0].config.save_pretrained(directory)
        engine = open_engine(config_of(tiny=tiny), Path(directory), seed=0, sleeps=checks.on_gpu)
        checks.found["start_s"] = round(time.monotonic() - begin, 1)
        try:
            await checks.hold(engine, 0)
            for temperature in (1.0, 0.7):
                await checks.steady(engine, temperature)
            for temperature in (1.0, 0.7):
                await checks.swapped(engine, temperature)
            before = await checks.fresh(engine)
            await engine.sleep()
            await engine.wake()
            checks.found["after_a_sleep_as_before"] = await checks.fresh(engine) == before
        finally:
            await engine.close()
        fresh = open_engine(config_of(tiny=tiny), Path(directory), seed=0)
        try:
            await checks.hold(fresh, 1)
            got = await asyncio.gather(*[answer(fresh, one, 16, 0.0) for one in checks.prompts])
            same = [ours == one.tokens for ours, one in zip(before, got, strict=True)]
            checks.found["as_a_fresh_engine"] = {"same_answers": sum(same), "of": len(same)}
        finally:
            await fresh.close()
    return checks.found


def main() -> None:
    """Run a process for each kind of model, and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models in float32")
    parser.add_argument("--stage-s", type=float, default=220, help="seconds for each kind of model")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(asyncio.run(check(given.only, tiny=given.tiny))), flush=True)
        return
    versions = {name: version_of(name) for name in ("sglang", "torch", "transformers")}
    result: dict[str, Any] = {"versions": versions}
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.sglang_exact", "--only", kind, *["--tiny"] * given.tiny]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=given.stage_s, check=False)
            lines = done.stdout.splitlines()
            result[kind] = json.loads(lines[-1]) if done.returncode == 0 else {"exit_code": done.returncode}
        except subprocess.TimeoutExpired:
            result[kind] = {"timed_out_after_s": given.stage_s}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

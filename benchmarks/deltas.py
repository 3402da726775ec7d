"""The cost of a lossless delta between two versions, against all of the weights.

    python -m benchmarks.deltas [--learning-rates 1e-6 1e-5] [--steps 12] [--hidden 512] [--layers 6]

A Qwen3 of random weights takes real steps: a policy gradient over random tokens with random advantages, AdamW on
fp32 masters; the masters rounded to bf16 are published. Every delta is applied, and the result compared. A line
for every step goes to standard error; the last line of standard output is one JSON object, its figures medians over
the second half of the steps, since Adam's first ones are its longest.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.func import functional_call
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.deltas import encode, patch
from headway.weightsync.tensors.staging import StagedWeights, stage

BUCKET_BYTES = 64 << 20
SEQUENCES, TOKENS = 4, 64
VOCABULARY = 16_384
FOREVER = Deadline(math.inf)

T = TypeVar("T")
Masters = dict[str, torch.Tensor]


def model_of(hidden: int, layers: int) -> Qwen3ForCausalLM:
    """Return a model with the same random weights in every call; its own parameters are the masters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def published(masters: Masters) -> StagedWeights:
    """Return the weights rounded, in buckets, with digests."""
    return stage(((name, master.detach().bfloat16()) for name, master in masters.items()), BUCKET_BYTES)


def trained(model: Qwen3ForCausalLM, learning_rate: float, steps: int) -> Iterator[Masters]:
    """Yield the masters before the first step and after each step."""
    masters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=learning_rate, weight_decay=0.01)
    yield masters
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
        advantages = torch.randn(SEQUENCES, 1)
        rounded = {name: master.bfloat16().float() for name, master in masters.items()}
        logits = functional_call(model, rounded, kwargs={"input_ids": tokens[:, :-1], "use_cache": False}).logits
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        yield masters


def measure(learning_rate: float, steps: int, hidden: int, layers: int) -> dict[str, Any]:
    """Return medians over the second half of the steps."""
    versions = trained(model_of(hidden, layers), learning_rate, steps)
    base, looks = published(next(versions)), []
    for masters in versions:
        target, stage_s = _timed(lambda: published(masters))  # noqa: B023 - called at once
        looks.append({"stage_s": stage_s, **compare(base, target)})
        print(json.dumps({"learning_rate": learning_rate, **looks[-1]}), file=sys.stderr, flush=True)
        base = target
    settled = looks[len(looks) // 2 :]
    medians = {name: statistics.median(look[name] for look in settled) for name in looks[0]}
    return {"learning_rate": learning_rate, "steps": steps, **medians}


def compare(base: StagedWeights, target: StagedWeights) -> dict[str, float]:
    """Return the figures of one delta: the share of changed elements, bytes and seconds."""
    delta, encode_s = _timed(lambda: encode(base, target, FOREVER))
    if delta is None:
        raise SystemExit("the delta is larger than the weights: nothing to compare")
    found = {index: bucket.clone() for index, bucket in enumerate(base.buckets)}
    _, patch_s = _timed(lambda: patch(found, base.tensors, delta))
    if not all(torch.equal(found[index], bucket) for index, bucket in enumerate(target.buckets)):
        raise SystemExit("the patched weights are not those that were meant")
    pairs = zip(base.buckets, target.buckets, strict=True)
    changed = sum(int((old.view(torch.int16) != new.view(torch.int16)).sum()) for old, new in pairs)
    return {
        "changed_share": changed / (target.nbytes // 2),
        "full_bytes": target.nbytes,
        "delta_bytes": len(delta),
        "delta_share": len(delta) / target.nbytes,
        "bits_per_change": 8 * len(delta) / max(1, changed),
        "encode_s": encode_s,
        "patch_s": patch_s,
    }


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    cases = [measure(rate, options.steps, options.hidden, options.layers) for rate in options.learning_rates]
    print(json.dumps({"cases": cases}))


if __name__ == "__main__":
    main()

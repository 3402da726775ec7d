"""Whether each text architecture of the installed transformers trains, and how far engine and learner agree on it.

    python -m benchmarks.architectures [NAME ...] [--engine embedded,vllm] [--timeout-s 300]

Each architecture gets a tiny random model, whose every tensor is moved away from what transformers begins with, so that
nothing that a wrong forward pass leaves out is 0 or 1. As in the product the learner reads it from its directory, the
engine opens its configuration alone and is sent the weights, samples, and is sent them again after an optimizer step.
The figures are |learner's logprob - engine's| of a sampled token, in float32, of all samples packed into one row; those
of the second version count, too.

A line is one of: trains (with the figures), refused (before a process of a run would start, in these words) and failed
(neither, so a fault of Headway's). It prints a table to stderr and one JSON object; the exit code is 1 if one failed.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headway.broker.errors import HeadwayError
from headway.broker.schema import WeightVersion
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.packing import PackableSequence, concatenate
from headway.learner.config import ModelConfig, OptimizerConfig, RandomModelConfig
from headway.learner.models.architectures import check_architecture
from headway.learner.models.directory_checks import read_config
from headway.learner.models.model_files import model_files
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.objective.logprob_agreement import EXACT
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine, GenerationRequest
from headway.rollout_workers.model_download import write_model
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from . import command
from .processes import isolated, last_words

BOUND = EXACT
"""The largest mean difference that counts as agreement."""
ALPHABET = "".join(map(chr, range(33, 127)))
PROMPTS, NEW_TOKENS, LONGEST = (5, 9, 14, 3, 11, 7), 12, 64
WIDTH, HEAD = 128, 32
SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), WIDTH)
    | dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 192)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64)
    | {"num_key_value_heads": 2, "head_dim": HEAD, "rotary_dim": 16, "num_nextn_predict_layers": 0}
    | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    | dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout"), 0.0)
)
"""Small values of the keys that configurations have, by any of their names."""
_LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "head_dim": 16, "num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), _LATENT),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gpt_neox": {"rotary_pct": 0.25},
}
"""The settings that an architecture needs besides."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process."""

    architecture: str
    engine: str


def every() -> list[str]:
    """Return the types of all causal language models of text of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_text(name)]


def is_text(architecture: str) -> bool:
    """Return whether the model reads text alone."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(architecture)
    except Exception:  # noqa: BLE001 - it needs parts of other models
        return False
    # An assistant drafts tokens for another model, whose states it reads.
    is_alone = config.get_text_config() is config and not config.is_encoder_decoder
    reads_others = architecture.endswith("assistant") or any(
        name.startswith(("vision", "audio")) for name in vars(config)
    )
    return is_alone and not reads_others


def measured(told: object) -> dict[str, Any]:
    """Return the line of one architecture, with its figures or the words that refuse it."""
    order = msgspec.convert(told, Order)
    with tempfile.TemporaryDirectory(prefix="headway-architectures-") as place:
        try:
            check_architecture({"model_type": order.architecture}, "fsdp", order.engine)
            model = write(order.architecture, Path(place, "model"))
            check_architecture(read_config(model.path) or {}, "fsdp", order.engine)
        except HeadwayError as error:
            return {"outcome": "refused", "words": str(error)}
        found = asyncio.run(_agreement(model, order.engine, Path(place, "engine")))
    mean = max(one["mean"] for one in found)
    outcome = "trains" if mean < BOUND else "failed"
    return {"outcome": outcome, "mean": mean, "max": max(one["max"] for one in found), "tokens": found[0]["tokens"]}


def write(architecture: str, directory: Path) -> ModelConfig:
    """Write a tiny model with its tokenizer."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(
        ModelConfig(random=RandomModelConfig(architecture="qwen3", config={}, alphabet=ALPHABET))
    )
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = tiny_config(architecture, ids | {"bos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return ModelConfig(path=str(directory), dtype="float32")


def tiny_config(architecture: str, more: dict[str, Any]) -> Any:
    """Return a small configuration, with full attention in all layers where the architecture allows that."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(architecture)
    known = {*vars(plain), *plain.attribute_map}
    sizes = {name: size for name, size in SIZES.items() if name in known} | OWN.get(architecture, {}) | more
    for full in ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, {"sliding_window": None}, {}):
        with suppress(Exception):  # what an architecture does not allow raises anything
            return AutoConfig.for_model(architecture, **sizes, **{name: full[name] for name in full if name in known})
    return AutoConfig.for_model(architecture, **sizes)


async def _agreement(model: ModelConfig, kind: str, directory: Path) -> list[dict[str, Any]]:
    """Return the figures of the first weights, and of those after a step."""
    backend: Backend = open_backend("fsdp", model, OptimizerConfig(learning_rate=1e-2))
    write_model(model_files(model), directory)
    config = EngineConfig(kind=kind, max_concurrent=len(PROMPTS), max_model_len=LONGEST, options=_options(kind))
    engine = open_engine(config, directory, seed=0)
    found = []
    for step in range(2):
        await engine.swap_weights(
            WeightVersion(1, step), [(name, one.clone()) for name, one in backend.named_tensors()]
        )
        sampled = await asyncio.gather(*[_sampled(engine, number, size) for number, size in enumerate(PROMPTS)])
        found.append(_difference(backend, sampled))
        _train(backend, sampled)
    await engine.close()
    return found


def _options(kind: str) -> dict[str, object]:
    return {"enforce_eager": True} if kind == "vllm" else {}


async def _sampled(engine: Engine, number: int, size: int) -> PackableSequence:
    vocabulary = len(ALPHABET)
    prompt = np.random.default_rng(number).integers(0, vocabulary, size).tolist()
    asked = GenerationRequest(
        request_id=str(number), prompt_tokens=prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, stop_token_ids=[]
    )
    recorder = Recorder()
    await generate(engine, asked, recorder)
    return PackableSequence(
        token_ids=np.asarray([*prompt, *recorder.tokens], np.int32),
        prompt_length=size,
        loss_mask=np.ones(NEW_TOKENS, np.uint8),
        behavior_logprobs=np.asarray(recorder.logprobs, np.float32),
        lags=np.zeros(NEW_TOKENS, np.int64),
        advantages=np.linspace(-1, 1, NEW_TOKENS, dtype=np.float32),
    )


def _difference(backend: Backend, sampled: Sequence[PackableSequence]) -> dict[str, Any]:
    row = concatenate(sampled)
    (logprobs_T,) = backend.logprobs([row], 1.0)
    off = (logprobs_T - row.behavior_logprobs_T).abs()[row.loss_mask_T > 0].double()
    return {"mean": float(off.mean()), "max": float(off.max()), "tokens": off.numel()}


def _train(backend: Backend, sampled: Sequence[PackableSequence]) -> None:
    row = concatenate(sampled)

    def loss(_: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return -(current_T * row.advantages_T).sum() / 100, {}

    _, norm, _ = backend.step([row], loss, 1.0, 1e-2)
    assert 0 < norm < float("inf"), f"the gradient's norm is {norm}"


def main() -> int:
    """Return the exit code: 1 if an architecture neither trains nor is refused."""
    options = _parse()
    results: dict[str, dict[str, Any]] = {engine: {} for engine in options.engine}
    for engine, name in product(options.engine, options.names or every()):
        order = {"architecture": name, "engine": engine}
        outcome = isolated("benchmarks.architectures:measured", order, 1, options.timeout_s)
        line = outcome.get("result") or {"outcome": "failed", "words": last_words(outcome)}
        results[engine][name] = line
        what = f"mean {line['mean']:.1e}, worst {line['max']:.1e}" if "mean" in line else line["words"][:150]
        command.tell(f"| {name} | {engine} | {line['outcome']} | {what} |")
    counts = {engine: Counter(one["outcome"] for one in lines.values()) for engine, lines in results.items()}
    return command.finish({"bound": BOUND, "counts": counts, **results}, any(one["failed"] for one in counts.values()))


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "architectures")
    parser.add_argument("names", nargs="*", help="types of models, such as llama; all by default")
    parser.add_argument("--engine", type=command.names, default=["embedded"])
    parser.add_argument("--timeout-s", type=float, default=300.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

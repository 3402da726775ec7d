"""Refuses architectures that no part of Headway trains or serves rightly, by the type that config.json names.

The types are those of the transformers that Headway is tested with: `python -m benchmarks.architectures` tries each.
A type that stands nowhere here is judged by the models themselves: each counts, in its first forward pass, the layers
that attend by Headway's own function, and the first batch compares the engine with the learner.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headway.broker.errors import ConfigError

MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The types that the megatron backend holds."""
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Options of models whose logits are more than the output embedding's product."""

WIDEST_HEAD = 256
"""The widest attention head that the variable-length kernels take, torch's own and flash-attn-4's."""

ATTENTIVE = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that keep no state but keys and values."""

_MASKS = "its layers attend by masks or functions of their own, by which sequences of one row would leak"
_SINKS = "its attention has sinks, which the learner's does not compute"
_STATES = "its layers carry states over the tokens of a row, from one sequence to the next"
_HEAD = "its output head has a bias, or scales or caps what it gives, which the learner's loss does not compute"
_WINDOWS = "some of its layers see a window or blocks alone"

_UNTRAINED: Mapping[str, str] = {
    _MASKS: "axk2 bloom blt codegen cpmant deepseek_v32 deepseek_v4 diffllama doge falcon glm_moe_dsa gpt_neo"
    " gpt_neox_japanese hrm_text hy_v4 llama4_text moshi mpt openai-gpt qwen4_exp_text reformer trocr xglm",
    _SINKS: "gpt_oss granite_swa granitemoe_swa",
    _STATES: "bamba falcon_h1 falcon_mamba jamba mamba mamba2 olmo_hybrid recurrent_gemma rwkv xlstm zamba zamba2 zaya",
    _HEAD: "bert bert-generation big_bird camembert ctrl data2vec-text electra ernie git gptj megatron-bert minicpm3"
    " modernbert-decoder phi rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl"
    " xlnet xmod",
}
_WITH_WINDOWS = (
    "cohere_compass_text cwm exaone_moe gemma3n_text gemma4_text gemma4_unified_text inkling_text mimo_v2_flash"
)
UNTRAINED: Mapping[str, str] = {kind: reason for reason, kinds in _UNTRAINED.items() for kind in kinds.split()}
"""Types that the fsdp backend does not train, and why."""
UNSERVED: Mapping[str, str] = dict.fromkeys(_WITH_WINDOWS.split(), _WINDOWS)
"""Types that the embedded engine does not run beside those, and why."""


def check_architecture(config: Mapping[str, Any], backend: str, engine: str, key: str = "model.path") -> None:
    """Raises ConfigError, which names the architecture, for a model that the backend does not train or the engine does
    not run. `config`: config.json, or of a random model what stands for it; without a type it passes."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return
    if reason := _BY_BACKEND.get(backend, _nothing)(config):
        raise ConfigError(f"{key}: learner.backend={backend} cannot train {kind}: {reason}")
    if reason := _BY_ENGINE.get(engine, _nothing)(config):
        raise ConfigError(f"{key}: the {engine} engine does not support {kind}: {reason}. Set engine.kind=vllm.")


def check_heads(config: Mapping[str, Any], backend: str, device: str, dtype: str, key: str = "model.path") -> None:
    """Raises ConfigError for a model whose attention heads are wider than the kernel for packed rows takes, which
    the backends of Headway use on a GPU in fewer than 32 bits. `config`: as for `check_architecture`."""
    width = head_width(config)
    if backend in _BY_BACKEND and device.startswith("cuda") and dtype != "float32" and width > WIDEST_HEAD:
        raise ConfigError(
            f"{key}: an attention head of this {config.get('model_type', 'model')} is {width} wide, and the kernel for"
            f" packed rows on GPUs in {dtype} takes at most {WIDEST_HEAD}. Set model.dtype=float32, for which another"
            " one computes any width, or take a model with narrower heads."
        )


def head_width(config: Mapping[str, Any]) -> int:
    """Returns the width of the widest attention head that a configuration states; 0 where it says none."""
    inner = config.get("text_config")
    said = {**config, **inner} if isinstance(inner, Mapping) else config
    sizes = {name: size for name, size in said.items() if type(size) is int and size > 0}
    hidden = sizes.get("hidden_size", 0)
    whole = sizes.get("head_dim") or hidden // sizes.get("num_attention_heads", hidden + 1)
    parts = sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0)  # of attention over latent vectors
    return max(parts or whole, *(sizes.get(name, 0) for name in ("v_head_dim", "global_head_dim")))


def _nothing(config: Mapping[str, Any]) -> str:
    return ""


def _not_of_megatron(config: Mapping[str, Any]) -> str:
    if config.get("model_type") in MEGATRON:
        return ""
    return f"it trains {', '.join(MEGATRON)}. Set learner.backend=fsdp."


def _not_of_fsdp(config: Mapping[str, Any]) -> str:
    reason = untrained(config)
    return reason and f"{reason}. Take a model of another architecture, such as qwen3 or llama."


def untrained(config: Mapping[str, Any]) -> str:
    """Returns why the fsdp backend does not train the model; "" if nothing is known against it."""
    if any(config.get(name) not in (None, 1) for name in SCALED_LOGITS):
        return _HEAD
    return _STATES if _layers_of(config) - ATTENTIVE else UNTRAINED.get(str(config.get("model_type")), "")


def unserved(config: Mapping[str, Any]) -> str:
    """Returns why the embedded engine does not run the model; "" if nothing is known against it."""
    windows = _layers_of(config) - {"full_attention"}
    return _WINDOWS if windows else UNSERVED.get(str(config.get("model_type")), "")


def _layers_of(config: Mapping[str, Any]) -> set[str]:
    """Returns the kinds of the layers, as far as the configuration names them."""
    kinds = config.get("layer_types")
    return set(map(str, kinds)) if isinstance(kinds, list) else set()


_BY_BACKEND: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"fsdp": _not_of_fsdp, "megatron": _not_of_megatron}
_BY_ENGINE: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"embedded": unserved}

"""Starts vLLM as a runtime of scorers: its arguments, and which models it can run."""

import os
from typing import Any

from headway.broker.errors import ConfigError
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.engines.abilities import gpus_with
from headway.rollout_workers.engines.vllm.environment import prepare_environment
from headway.rollout_workers.engines.vllm.start import check_head_dim
from headway.rollout_workers.scorers.base import Runner, ScoringModel, UnfitModelError
from headway.rollout_workers.scorers.runtimes.cache import cache_tokens
from headway.rollout_workers.scorers.runtimes.files import check_head, check_labels, longest_of, reading, shared_tokens

from .abilities import STEP_TOKENS, VLLM
from .engine import BatchEngine
from .reward_model import VllmRewardModel
from .teacher import VllmTeacher

SEQUENCES = 256
"""The most requests of one step."""
TRANSFORMERS = "scorers.engine.kind=transformers"
UNLOADED = ("were not initialized from checkpoint", "There is no module or parameter named")
"""The words with which vLLM refuses a model whose files have too few or too many weights."""


def open_vllm(asked: ScoringModel, config: ScorersConfig) -> Runner:
    """Start vLLM with the model. Raises UnfitModelError, and ConfigError for a device that this vLLM does not use."""
    prepare_environment(config.threads)
    if config.dtype == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # Triton would multiply it as TF32
    _check_device(config.device)
    model = _model_config(asked)
    text = model.get_text_config()
    is_teacher = asked.kind == "teacher"
    most_tokens = min(asked.most_tokens or longest_of(model), longest_of(model))
    if is_teacher:  # vLLM insists on a place for one more token, which nobody reads
        most_tokens = min(most_tokens + 1, longest_of(model))
    engine = _start(asked, arguments_of(asked, config, text, most_tokens))
    if is_teacher:
        shared = shared_tokens(text.vocab_size, asked.policy)
        return VllmTeacher(engine, text.vocab_size, most_tokens - 1, shared)
    return VllmRewardModel(engine, text.vocab_size, most_tokens)


def arguments_of(asked: ScoringModel, config: ScorersConfig, text: Any, most_tokens: int) -> dict[str, Any]:
    """Return the arguments of EngineArgs for a model whose text part has the configuration `text`.
    `scorers.engine.options` override these.

    vLLM reserves a cache for what is asked of a scorer, and measures no memory. So several scorers may share a GPU,
    and they may start at the same time.
    """
    tokens = cache_tokens(config.batch_tokens, most_tokens)
    arguments: dict[str, Any] = {
        "model": asked.path,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "load_format": "safetensors",  # no pickle of the model's is read
        "dtype": config.dtype,
        "max_model_len": most_tokens,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": STEP_TOKENS[asked.kind],
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": tokens
        * bytes_of_token(text, config.dtype)
        // gpus_with(config.engine.options, VLLM.abilities.gpu_options, "scorers.engine.options"),
        "gpu_memory_utilization": 0.01,  # vLLM refuses to start where less of a GPU is free
        "async_scheduling": False,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    return arguments | _arguments_of_kind(asked, text) | config.engine.options


def bytes_of_token(text: Any, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2))


def _arguments_of_kind(asked: ScoringModel, text: Any) -> dict[str, Any]:
    architecture = {"architectures": [_causal_class(asked, text)]}
    if asked.kind == "teacher":  # vLLM reads no cache for a prompt whose logprobs it tells
        return {"runner": "generate", "max_logprobs": -1, "enable_prefix_caching": False, "hf_overrides": architecture}
    from vllm.config import PoolerConfig

    return {
        "runner": "pooling",
        "convert": "classify",
        "pooler_config": PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        "hf_overrides": architecture,
    }


def _causal_class(asked: ScoringModel, text: Any) -> str:
    """Return the name of the model's causal language model, by which vLLM knows the layers below a reward model's
    head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if name is None:
        raise UnfitModelError(
            f"{asked.key}: {asked.path} is a {text.model_type}, of which there is no causal language model, and vLLM"
            f" scores with these only. Set {TRANSFORMERS}."
        )
    return str(name)


def _model_config(asked: ScoringModel) -> Any:
    from transformers import AutoConfig

    with reading(asked.path, asked.key):
        model = AutoConfig.from_pretrained(asked.path, trust_remote_code=False)
    if asked.kind == "reward_model":
        check_labels(model, asked)
    check_head(model, asked)  # vLLM notices no missing weights of linear layers
    check_head_dim(model.get_text_config(), TRANSFORMERS)
    return model


def _start(asked: ScoringModel, arguments: dict[str, Any]) -> BatchEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return BatchEngine(LLMEngine.from_engine_args(EngineArgs(**arguments)))
    except ValueError as error:
        if not any(words in str(error) for words in UNLOADED):
            raise
        told = " ".join(str(error).split())[:500]
        raise UnfitModelError(f"{asked.key}: {asked.path} cannot be loaded: {told}") from error


def _check_device(device: str) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device == "cpu"):
        own = "a CPU" if current_platform.is_cpu() else "GPUs"
        raise ConfigError(
            f"scorers.device is {device}, and the vLLM of this installation runs on {own}. Set scorers.device to"
            f" {'cpu' if current_platform.is_cpu() else 'cuda'}, or {TRANSFORMERS}."
        )

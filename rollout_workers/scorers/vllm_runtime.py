"""vLLM as a runtime of scorers, in the scorer's own process.

    open_vllm ─► BatchEngine: a batch of prompts ─► vLLM ─► VllmRewardModel: the head's output at the last token
                                                         └► VllmTeacher: the logprobs of the prompt's last tokens

The invariant: scores are those of the model's files. A head without weights there is refused, no activation changes a
score, and a batch that failed leaves no request for the next one.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.broker.client.scoring import Scores
from headway.broker.errors import ConfigError
from headway.broker.schema import ScoreRequest
from headway.rollout_workers.config import ScorersConfig
from headway.rollout_workers.engines.abilities import gpus_with
from headway.rollout_workers.engines.vllm.fork_server import prepare_environment
from headway.rollout_workers.engines.vllm.open_vllm import check_head_dim

from . import Runner, ScoringModel, UnfitModelError, pack_candidates, tokens_of
from .model_checks import check_head, check_labels, longest_of, reading, shared_tokens
from .runtimes import STEP_TOKENS, VLLM, cache_tokens


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


class VllmRewardModel:
    """Scores whole responses by the output of the head at the last token."""

    def __init__(self, engine: BatchEngine, vocabulary: int, longest: int) -> None:
        from vllm import PoolingParams

        self._engine = engine
        self.vocabulary = vocabulary
        self.longest = longest
        self._params = PoolingParams(task="classify", use_activation=False)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [1] float32 for each request."""
        params = [self._params.clone() for _ in requests]
        outputs = self._engine.answers([tokens_of(request) for request in requests], params)
        return [output.outputs.data.reshape(1).float().cpu().numpy() for output in outputs]


class VllmTeacher:
    """Scores response tokens by vLLM's prompt logprobs, which are those at temperature 1."""

    def __init__(self, engine: BatchEngine, vocabulary: int, longest: int, shared: int) -> None:
        """`shared`: the number of the first token ids that may be candidates."""
        self._engine = engine
        self.vocabulary = vocabulary
        self.longest = longest
        self._shared = shared

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return [R] float32 for each request: natural logarithms; with candidates as
        `pack_candidates` lays them out. Raises ValueError for another temperature than 1."""
        for request in requests:
            _check(request)
        answers = self._answers(requests, surplus=0)
        short = [number for number, answer in enumerate(answers) if answer is None]
        again = self._answers([requests[number] for number in short], surplus=self.vocabulary - self._shared)
        for number, answer in zip(short, again, strict=True):
            answers[number] = answer
        assert all(answer is not None for answer in answers)
        return [answer for answer in answers if answer is not None]

    def _answers(self, requests: Sequence[ScoreRequest], surplus: int) -> list[Scores | None]:
        """Ask for so many more candidates of each token than wanted. An answer is None where too few of them are the
        policy's tokens."""
        params = [self._params(request.top_k + surplus) for request in requests]
        outputs = self._engine.answers([tokens_of(request) for request in requests], params)
        return [self._answer(*one) for one in zip(requests, outputs, strict=True)]

    def _answer(self, request: ScoreRequest, output: Any) -> Scores | None:
        """N numbers in a row: those of the token itself, and of its candidates, the likeliest first."""
        length = len(request.prompt_tokens) + len(request.response_tokens) - 1
        flat = output.prompt_logprobs
        tokens_RN = np.array(flat.token_ids, np.int64).reshape(length, -1)[-len(request.response_tokens) :]
        logprobs_RN = np.array(flat.logprobs, np.float32).reshape(length, -1)[-len(request.response_tokens) :]
        logprobs_RN = np.minimum(logprobs_RN, 0)
        is_strange_RN = tokens_RN[:, 1:] >= self._shared
        if ((~is_strange_RN).sum(1) < request.top_k).any():
            return None
        best_RK = np.argsort(is_strange_RN, axis=1, kind="stable")[:, : request.top_k]
        best_tokens_RK = np.take_along_axis(tokens_RN[:, 1:], best_RK, 1)
        return pack_candidates(logprobs_RN[:, 0], best_tokens_RK, _taken(logprobs_RN[:, 1:], best_RK))

    def _params(self, candidates: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=min(candidates, self.vocabulary),
            flat_logprobs=True,
            detokenize=False,
        )


def _taken(logprobs_RN: NDArray[np.float32], best_RK: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.take_along_axis(logprobs_RN, best_RK, 1)


def _check(request: ScoreRequest) -> None:
    if not len(request.prompt_tokens):  # nothing comes before the first token, which thus has no probability
        raise ValueError("a response without a prompt")
    if request.temperature != 1:
        raise ValueError(
            f"vLLM tells a teacher's logprobs at temperature 1 alone, and the request's is {request.temperature:g}; set"
            " sampling.temperature=1, or scorers.engine.kind=transformers"
        )


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
        reason = " ".join(str(error).split())[:500]
        raise UnfitModelError(f"{asked.key}: {asked.path} cannot be loaded: {reason}") from error


def _check_device(device: str) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device == "cpu"):
        own = "a CPU" if current_platform.is_cpu() else "GPUs"
        raise ConfigError(
            f"scorers.device is {device}, and the vLLM of this installation runs on {own}. Set scorers.device to"
            f" {'cpu' if current_platform.is_cpu() else 'cuda'}, or {TRANSFORMERS}."
        )

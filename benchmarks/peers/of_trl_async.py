"""python -m benchmarks.peers.of_trl_async ORDER RESULT

The driver of TRL's AsyncGRPOTrainer, in an interpreter that has TRL and vLLM: the trainer on one GPU, `vllm serve` on
another, to which it sends its weights by NCCL. On one GPU both share it, and NCCL, which wants one rank on a GPU of a
host, takes them for two hosts. ORDER and RESULT are files of JSON. Steps are of exactly the race's samples
(`token_budget` 0, where TRL fills rows up to a number of tokens), and weights are sent after each.
"""

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.gpus import on_host
from headway.broker.schema import Prompt

from . import trl_agents
from .figures import Figures, Step, figures_of
from .of_trl import Judge, TrlOrder, TrlSetting, config_of, prompts_of, row_of
from .race import Race

if TYPE_CHECKING:
    import torch

NAME = "trl-async"
LARGEST_PASS = {1: 64, 2: 128}
"""Samples in one forward and backward pass, by the number of GPUs: more of the longest responses do not fit beside
their gradients, and on one GPU beside the server."""
SERVERS_SHARE = {1: 0.3, 2: 0.85}
"""The share of its GPU's memory that the server takes, by the number of GPUs."""
ALL = "{{ messages[0]['content'] }}"
"""A chat template for a conversation whose only message has been rendered."""
NO_TOOLS = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"close_pattern": r"\Z", "content": "text"}},
}
"""A template of answers, which the trainer wants for a chat template that it does not know: all of it is text."""
SYNCHRONOUS = {
    "loss_type",  # it has one: the mean over all tokens
    "beta",
    "steps_per_generation",
    "shuffle_dataset",
    "use_vllm",
    "vllm_mode",
    "vllm_max_model_length",
    "vllm_importance_sampling_correction",
}
"""Arguments of GRPOConfig that AsyncGRPOConfig does not have."""
WARM_SERVER_S = 240.0
LONGEST_SYNC_S = 120
"""A group that NCCL cannot form is given up then, not after half an hour."""
MORE_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
"""The environment in which NCCL sends faster to what it takes for another host."""


def as_host(name: str) -> dict[str, str]:
    """Return the environment of one of the two processes that share a GPU."""
    return {**on_host(name), **MORE_SOCKETS}


def async_config_of(race: Race, directory: str, url: str) -> dict[str, Any]:
    """Return the arguments of AsyncGRPOConfig: those of the synchronous trainer, where it has them."""
    recipe = race.load()
    updates = recipe.learner.updates_per_step
    passes = -(-race.samples_per_step // (updates * LARGEST_PASS[race.gpus]))
    in_flight = queued = max(1, recipe.staleness.max_lag) * race.samples_per_step
    if trl_agents.is_of_agents(recipe):  # what is in flight for as long as the bound is thrown away
        in_flight, queued = max(1, recipe.staleness.max_lag - 1) * race.samples_per_step, race.samples_per_step
    common = config_of(race, TrlSetting(micro_batches=passes), directory)
    return {
        **{key: value for key, value in common.items() if key not in SYNCHRONOUS},
        "per_device_train_batch_size": race.samples_per_step // (updates * passes),  # one process trains
        **(trl_agents.limits_of(recipe, is_of_turn=True) if trl_agents.is_of_agents(recipe) else {}),
        "model_init_kwargs": {"dtype": "float32"},
        "token_budget": 0,
        "weight_sync_steps": updates,
        "max_staleness": recipe.staleness.max_lag,
        # Its own defaults count a step as one update, and weights go out once for all updates of the race's step.
        "max_inflight_tasks": in_flight,
        "queue_maxsize": queued,
        "logging_steps": 1,  # its metrics of a step come with its log
        "vllm_server_base_url": url,
        "vllm_server_timeout": WARM_SERVER_S,
        "weight_sync_timeout": LONGEST_SYNC_S,
    }


@contextmanager
def serving(race: Race, gpu: str) -> Iterator[str]:
    """Serve the race's model until the end of the block, on that GPU; gives the URL at which it will answer."""
    recipe = race.load()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", str(race.model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", recipe.engine.dtype, "--max-model-len", str(recipe.engine.max_model_len)),
        *("--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"),
        *("--gpu-memory-utilization", str(SERVERS_SHARE[race.gpus])),
        *("--weight-transfer-config", '{"backend": "nccl"}'),
    ]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpu}
    environment |= as_host("server") if race.gpus == 1 else {}
    with subprocess.Popen(command, env=environment) as server:
        is_over = threading.Event()

        def watch() -> None:
            code = server.wait()
            if not is_over.is_set():  # the trainer would try again for minutes
                print(f"vllm serve ended with exit code {code}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="watching the server", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            is_over.set()
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


class PathKernel:
    """Stands in for the hub's FlashAttention 3, of which TRL calls one function."""

    def flash_attn_varlen_func(
        self,
        query_QHD: "torch.Tensor",
        key_KHD: "torch.Tensor",
        value_KHD: "torch.Tensor",
        cu_queries: "torch.Tensor",
        cu_keys: "torch.Tensor",
        longest_queries: int,
        longest_keys: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> "torch.Tensor":
        """[Q, H, D]: each run of queries attends to its own keys, with which it ends.

        It is torch's variable-length kernel on a GPU, and one call of torch's attention for each run elsewhere.
        """
        assert causal, "TRL's trees are causal"
        assert window_size == (-1, -1), "no model of the race has a sliding window"
        if not query_QHD.is_cuda:
            return _run_by_run(query_QHD, key_KHD, value_KHD, cu_queries.tolist(), cu_keys.tolist(), softmax_scale)
        from torch.nn.attention.varlen import varlen_attn

        known = _options_of(varlen_attn)  # torch's versions name them differently
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            options["enable_gqa"] = query_QHD.shape[1] != key_KHD.shape[1]
        bounds = (cu_queries, cu_keys, longest_queries, longest_keys)
        attended = varlen_attn(query_QHD, key_KHD, value_KHD, *bounds, scale=softmax_scale, **options)
        assert not isinstance(attended, tuple)
        return attended


@cache
def _options_of(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


def _run_by_run(
    query_QHD: "torch.Tensor",
    key_KHD: "torch.Tensor",
    value_KHD: "torch.Tensor",
    cu_queries: list[int],
    cu_keys: list[int],
    scale: float,
) -> "torch.Tensor":
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    attended = []
    for run in range(len(cu_queries) - 1):
        query = query_QHD[cu_queries[run] : cu_queries[run + 1]].transpose(0, 1)
        key, value = (of[cu_keys[run] : cu_keys[run + 1]].transpose(0, 1) for of in (key_KHD, value_KHD))
        queries, keys = query.shape[1], key.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        one = scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        attended.append(one[0].transpose(0, 1))
    return torch.cat(attended)


class AsyncClock:
    """Makes steps of what the trainer logs of each of its updates."""

    def __init__(self, began: float, updates: int) -> None:
        self._began = began
        self._updates = updates
        self._logged: list[Mapping[str, float]] = []
        self._steps: list[Step] = []
        self._lags: list[float] = []
        self._syncs_s: list[float] = []

    def note(self, logs: Mapping[str, float]) -> None:
        """Note an update. Its reward may be of one forward pass later, as the trainer packs one ahead."""
        self._logged.append(logs)
        if len(self._logged) < self._updates:
            return
        self._steps.append(
            Step(
                end_s=time.time() - self._began,
                samples=round(sum(map(_samples, self._logged))),
                tokens=round(sum(log["batch/trained_tokens_per_step"] for log in self._logged)),
                reward=fmean(log["reward"] for log in self._logged if log.get("reward") is not None),
                learner_idle_s=sum(log["perf/rollout_wait_s"] for log in self._logged),
            )
        )
        self._lags += [log["sample/staleness_mean"] for log in self._logged if "sample/staleness_mean" in log]
        self._syncs_s += [log["perf/weight_sync_s"] for log in self._logged if "perf/weight_sync_s" in log]
        self._logged = []

    def figures(self) -> Figures:
        lag, sync_s = (fmean(of_updates) if of_updates else 0.0 for of_updates in (self._lags, self._syncs_s))
        return figures_of(self._steps, lag_mean=lag, weight_sync_s=sync_s)


def _samples(log: Mapping[str, float]) -> float:
    """Return the samples of an update, of whose rows an episode with a rewritten history has several."""
    return log["batch/samples_per_step"] / log.get("rollout/samples_per_rollout", 1.0)


def run(order: TrlOrder) -> Figures:
    """Serve, train, save the model, and return the figures. The server starts while the trainer is imported."""
    assert order.server_gpu is not None
    with serving(order.race, order.server_gpu) as url:
        return _trained(order, url)


def _trained(order: TrlOrder, url: str) -> Figures:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    race, model = order.race, order.race.model
    packing._flash_attn = PathKernel
    recipe = race.load()
    clock = AsyncClock(order.began, recipe.learner.updates_per_step)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = prompts_of(recipe, recipe.learner.steps, tokenizer)
    is_of_agents = trl_agents.is_of_agents(recipe)
    rows = trl_agents.rows_of(recipe, prompts, tokenizer) if is_of_agents else _rows(prompts, tokenizer)

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers exports it lazily, without a type
        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **_options: Any) -> None:
            if "batch/samples_per_step" in logs:
                clock.note(dict(logs))

    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=AsyncGRPOConfig(**async_config_of(race, order.model, url)),
        reward_funcs=Judge(race),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Steps()],
        environment_factory=trl_agents.factory_of(recipe) if is_of_agents else None,
    )
    trainer.train()
    trainer.save_model(order.model)
    AutoTokenizer.from_pretrained(model).save_pretrained(order.model)  # with the model's own chat template
    return clock.figures()


def _rows(prompts: Sequence[Prompt], tokenizer: Any) -> list[dict[str, Any]]:
    tokenizer.chat_template, tokenizer.response_template = ALL, NO_TOOLS
    rows = [{**row_of(prompt), "prompt": [{"role": "user", "content": prompt.text}]} for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        read = tokenizer.apply_chat_template(row["prompt"], return_dict=False, add_generation_prompt=True)
        assert read == list(prompt.token_ids), "TRL's model must read what Headway's reads"
    return rows


def main() -> None:
    """Make the ordered run, and write its figures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the trainer's own processes end, too
    order, result = map(Path, sys.argv[1:])
    figures = run(msgspec.json.decode(order.read_bytes(), type=TrlOrder))
    result.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()

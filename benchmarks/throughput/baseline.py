"""transformers' own training step over the same sequences: its model, its attention, its full logits.

Without flash-attn, users of transformers have padded rows with an attention mask, or one packed row whose position ids
restart. fp32 parameters and moments in `fully_shard`, bfloat16 computation, as accelerate and Headway set it up.

B rows, L longest, T tokens that are none of padding, V vocabulary.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence
from headway.learner.config import OptimizerConfig
from headway.learner.objective.objective import Objective
from headway.learner.ranks import Ranks

from .case import LEARNING_RATE, Case
from .leaks import leak_of
from .names import ATTENTION
from .rows import Rows, packed_rows, padded_rows


class BaselineTraining:
    """A `TrainingStep` (see `case`) without any part of Headway but the objective."""

    def __init__(self, case: Case, model: Path, optimizer: OptimizerConfig, given: Sequence[PackableSequence]) -> None:
        self._device = _join_ranks(case.device)
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self._ranks = Ranks(self.rank, world_size, self.rank, world_size, True)
        _, layout, variant = case.name.split("-")
        if layout == "packed":
            self._rows = packed_rows(given, case.micro_batch_tokens, self.rank, world_size)
        else:
            rows = None if variant == "budget" else int(variant)
            self._rows = padded_rows(given, case.micro_batch_tokens, rows, self.rank, world_size)
        self._batches = [_moved(rows.batch, self._device) for rows in self._rows]
        self._model = _open_model(case, model, ATTENTION.get(variant, "sdpa"), self._device)
        self._max_grad_norm = optimizer.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=LEARNING_RATE,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=case.device == "cuda",
        )
        self._objective = Objective(AlgorithmConfig(), is_one_update=True)
        self.facts = self._facts(case) | (
            {"leak": leak_of(self._model, given, self._device)} if layout == "packed" else {}
        )

    def step(self) -> tuple[float, float]:
        """Take one update. Collective."""
        loss = self._objective.token_loss(self._batches, self._ranks.sum)
        total = torch.zeros((), device=self._device)
        for index, rows in enumerate(self._rows):
            assert isinstance(self._model, FSDPModule)
            self._model.set_requires_gradient_sync(index == len(self._rows) - 1)
            logprobs_T = rows.logprobs(self._model, self._device)
            share, _ = loss(index, logprobs_T) if rows.is_real else ((logprobs_T * 0.0).sum(), {})
            torch.autograd.backward(share * self._ranks.world_size)  # fully_shard averages over ranks
            total += share.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._ranks.sum([total.item()])[0], float(getattr(grad_norm, "full_tensor", lambda: grad_norm)())

    def _facts(self, case: Case) -> dict[str, Any]:
        places, tokens = (self._ranks.sum([sum(counts)])[0] for counts in zip(*map(_sizes, self._rows), strict=True))
        return {
            "micro_batches": len(self._rows),
            "padding": round(1 - tokens / places, 4),
            "attention": self._model.config._attn_implementation,
            "experts": getattr(self._model.config, "_experts_implementation", None),
            "gradient_checkpointing": bool(self._model.is_gradient_checkpointing),
        }


def _sizes(rows: Rows) -> tuple[float, float]:
    return float(rows.token_ids_BL.numel()), float(rows.batch.num_tokens)


def _join_ranks(device: str) -> torch.device:
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)


def _open_model(case: Case, path: Path, attention: str, device: torch.device) -> Any:
    """Open the model in training mode, where alone transformers recomputes layers; these models have no dropout."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
    model.to(device=device, dtype=torch.float32).train()
    model.config.use_cache = False
    if case.compute.recompute != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        if case.compute.compile:
            layer.compile(dynamic=True)
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def _moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        moved[field.name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return PackedBatch(**moved)

"""The comparison with TRL on supervised fine-tuning, on Headway's model.

The trainer's own preparation of records, its collator and its loss are called. TRL pads the batch that Headway packs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from headway.learner.data.records.record_types import Trained

from .imitated import by_parameters, conversations, imitated, model, tokenizer
from .of_verl import Setting
from .ours import Side
from .sample import Outcome, Sample

METRICS = {"token_accuracy": "mean_token_accuracy", "entropy": "entropy"}
"""Headway's names, and TRL's."""
NAMES: dict[Trained, str] = {"completion": "sft on completions", "assistant": "sft on all assistant turns"}
SINGLE_PRECISION = {setting for name in NAMES.values() for setting in (name, f"{name}, metrics")}
"""All settings: TRL computes logprobs in float32, and transformers the norms of layers."""


def settings() -> Iterator[Setting]:
    """Yield (name, Headway's side, TRL's side)."""
    for trained, name in NAMES.items():
        yield name, imitated(trained), by_trainer(trained)
        both = imitated(trained, metrics=[*METRICS]), by_trainer(trained, metrics=[*METRICS.values()])
        yield f"{name}, metrics", *both


def by_trainer(trained: Trained, *, metrics: Sequence[str] = ()) -> Side:
    """Return the trainer's loss, or its metrics."""

    def side(_: Sample) -> Outcome:
        network = model()
        add_fused_lm_head(network, outputs=("log_probs", "entropy", "is_top1"))
        trainer = _trainer(network, trained)
        collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer().pad_token_id)
        loss = SFTTrainer.compute_loss(trainer, network, collate(list(_prepared(trainer, trained))))
        if not metrics:
            return by_parameters(loss, network)
        return Outcome(torch.tensor([trainer._metrics["train"][name][-1] for name in metrics]))

    return side


def _prepared(trainer: Any, trained: Trained) -> Dataset:
    """Return tokens and labels of prompts with completions, or of whole conversations."""
    disable_progress_bars()
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in conversations()]
    if trained == "assistant":
        rows = [{"messages": row["prompt"] + row["completion"]} for row in rows]
    options = SFTConfig(max_length=None, assistant_only_loss=trained == "assistant", use_cpu=True, bf16=False)
    return SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer(), options, False, None, "train")


def _trainer(network: Any, trained: Trained) -> Any:
    """Return the trainer's values that preparation and loss read besides their inputs: one process."""
    PartialState(cpu=True)
    trainer = {
        "model": network,
        "_tokenizer": tokenizer(),
        "chat_template": None,
        "completion_only_loss": trained == "completion",
        "compute_loss_func": None,
        "label_smoother": None,
        "aux_loss_enabled": False,
        "args": SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        "accelerator": SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda x: x),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**trainer)

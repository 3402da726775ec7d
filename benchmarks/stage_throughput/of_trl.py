"""TRL's own trainers over the same file, set up for speed as its documentation says."""

import tempfile
from typing import Any

import msgspec
import torch

from headway.learner.models.attention import PackedLayout, varlen_attention

from .order import Order, Watch

VARLEN = "torch_varlen"


def measure_ordered(spec: object) -> dict[str, Any]:
    """Return the figures of a case."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    order = msgspec.convert(spec, Order)
    with tempfile.TemporaryDirectory(prefix="trl-stage-") as directory:
        data = load_dataset("json", data_files=order.data, split="train", cache_dir=f"{directory}/cache")
        tokenizer = AutoTokenizer.from_pretrained(order.model)
        trainer_of = {"sft": _sft, "dpo": _dpo}[order.task]
        return _train(order, trainer_of(order, data, tokenizer, directory))


def _train(order: Order, trainer: Any) -> dict[str, Any]:
    from transformers import TrainerCallback

    watch = Watch(order.device)
    loss_of = trainer.compute_loss

    def counted(model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        mask = inputs.get("attention_mask")
        watch.add(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
        return loss_of(model, inputs, *arguments, **options)

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers exports it lazily, without a type
        def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
            watch.step()

    trainer.compute_loss = counted
    trainer.add_callback(Steps())
    watch.begin()
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {**watch.figures(order.warm_up_steps), "first_loss": losses[0], "last_loss": losses[-1]}


def _common(order: Order, directory: str) -> dict[str, Any]:
    on_gpu = order.device == "cuda"
    return {
        "output_dir": directory,
        "max_steps": order.steps + order.warm_up_steps,
        "learning_rate": 1e-6,
        "bf16": True,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _sft(order: Order, data: Any, tokenizer: Any, directory: str) -> Any:
    """Configure a row of the token budget per pass, and as many passes a step as Headway's step needs."""
    from trl import SFTConfig, SFTTrainer

    attention = VARLEN if "-varlen" in order.name else "sdpa"
    if attention == VARLEN:
        _register_varlen()
    rows = max(1, round(order.records_per_step * order.mean_tokens / order.micro_batch_tokens))
    config = SFTConfig(
        **_common(order, directory),
        packing=True,
        packing_strategy="bfd",
        max_length=order.micro_batch_tokens,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=rows,
        torch_compile=order.name.endswith("-compiled"),
        model_init_kwargs={"dtype": "float32", "attn_implementation": attention},
    )
    return SFTTrainer(model=order.model, args=config, train_dataset=data, processing_class=tokenizer)


def _dpo(order: Order, data: Any, tokenizer: Any, directory: str) -> Any:
    from trl import DPOConfig, DPOTrainer

    pairs = int(order.name.rpartition("-")[2])
    config = DPOConfig(
        **_common(order, directory),
        max_length=2 * order.longest_tokens,
        precompute_ref_log_probs=True,
        per_device_train_batch_size=pairs,
        gradient_accumulation_steps=max(1, order.records_per_step // pairs),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    return DPOTrainer(model=order.model, args=config, train_dataset=data, processing_class=tokenizer)


def _register_varlen() -> None:
    """Have transformers attend with torch's variable-length kernel, to the bounds that TRL's collator computes."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(VARLEN, _attend)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend: [1, heads, T, width] queries, keys and values -> [1, T, heads, width]."""
    layout = PackedLayout(cu_seqlens=options["cu_seq_lens_q"], max_seqlen=int(options["max_length_q"]), buckets=None)
    q, k, v = (rows[0].transpose(0, 1).to(torch.bfloat16) for rows in (query, key, value))
    return varlen_attention(q, k, v, layout, options["scaling"])[None], None

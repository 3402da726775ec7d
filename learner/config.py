"""The learner's settings, with defaults; those of the loss are in `algorithm_config.py`."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, steps: int, *, peak: float, warmup_steps: int, schedule: Schedule) -> float:
    """Returns the rate of a step, from 0: it rises linearly to `peak` over `warmup_steps`, since fresh Adam moments
    make the first steps too large, and then stays, or falls towards 0 behind the last of `steps`."""
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))  # a replay may be told of fewer steps
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2


PROMPTS = ("arithmetic", "numbered", "jsonl", "parquet", "datasets", "reasoning_gym")
EXAMPLES = ("arithmetic", "calculator", "jsonl", "parquet", "reasoning_gym")
STAGES = ("sft", "dpo", "kto", "distill", "reward_model", "rl")
OVER_RECORDS = ("dpo", "kto", "distill", "reward_model")


class RandomModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from random weights, for tests and demonstrations."""

    architecture: Annotated[str, Meta(description="transformers' model type, such as qwen3_moe or qwen3")]
    config: Annotated[dict[str, Any], Meta(description="arguments of its transformers configuration")] = {}
    alphabet: Annotated[
        str, Meta(min_length=1, description="characters of its tokenizer, which has one token for each")
    ]


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter, which is trained in the place of the model's weights."""

    kind: Annotated[Literal["lora"], Meta(description="lora: W x + alpha / rank * B (A x), W as it was")] = "lora"
    rank: Annotated[int, Meta(ge=1, le=512, description="rank of every change")] = 16
    alpha: Annotated[float, Meta(gt=0, le=8192, description="a change is scaled by alpha / rank")] = 32.0
    targets: Annotated[
        tuple[str, ...],
        Meta(
            description="weights that it changes, by the ends of their names, such as q_proj or experts.down_proj;"
            " none: all linear layers and experts of the decoder, but no routers"
        ),
    ] = ()
    quantize_base: Annotated[
        Literal["none", "nf4", "int8"],
        Meta(
            description="number format of the frozen linear layers and experts: nf4 (4 bits, the extra `quantized`),"
            " int8, or none: model.dtype (fsdp)"
        ),
    ] = "none"
    dropout: Annotated[
        float,
        Meta(ge=0, lt=1, description="share of an adapter's inputs that supervised training leaves out; 0 with rl"),
    ] = 0.0
    stages: Annotated[
        tuple[str, ...],
        Meta(description="names of the stages that train it; the others train the whole model; none: every stage"),
    ] = ()

    @property
    def scale(self) -> float:
        """The factor of a change."""
        return self.alpha / self.rank


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is trained."""

    path: Annotated[str, Meta(description="a Hugging Face directory or hub id; empty: the model is `random`")] = ""
    random: Annotated[
        RandomModelConfig | None, Meta(description="a model to start with random weights, in the place of `path`")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="number format of the forward and backward pass")
    ] = "float32"
    chat_template: Annotated[
        str,
        Meta(description="file with the Jinja template that renders messages; empty: the tokenizer has one, or none"),
    ] = ""
    adapter: Annotated[
        AdapterConfig | None, Meta(description="the adapter that is trained; null: the whole model is")
    ] = None


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of prompts, and their order."""

    kind: Annotated[
        str,
        Meta(
            description=f"{', '.join(PROMPTS)}, or your own as package.module:Class; empty: no prompts, for stages that"
            " train on files alone"
        ),
    ] = ""
    path: Annotated[
        str, Meta(description="file, dataset id or task names separated by commas, depending on the kind")
    ] = ""
    options: Annotated[dict[str, Any], Meta(description="further arguments of the source")] = {}
    shuffle: Annotated[bool, Meta(description="the run's seed gives every epoch a new order")] = True
    epochs: Annotated[int, Meta(ge=0, description="passes over the prompts; 0: as many as learner.steps takes")] = 0
    system_prompt: Annotated[
        str, Meta(description="system message that turns each text prompt into a conversation; empty: none")
    ] = ""
    deadline_s: Annotated[
        float,
        Meta(gt=0, description="longest one call of your own source may take, in seconds; it is then made once more"),
    ] = 60.0


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of AdamW."""

    learning_rate: Annotated[
        float, Meta(ge=0, description="peak learning rate; 0: nothing is learned, as a control")
    ] = 1e-6
    beta1: Annotated[float, Meta(ge=0, lt=1, description="decay of the first moment")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="decay of the second moment")] = 0.95
    epsilon: Annotated[float, Meta(gt=0, description="constant added to the update's denominator")] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, description="decoupled weight decay")] = 0.0
    max_grad_norm: Annotated[
        float, Meta(gt=0, description="largest norm of the gradients, which are scaled down to it")
    ] = 1.0
    warmup_steps: Annotated[int, Meta(ge=0, description="steps over which the learning rate rises linearly")] = 0
    schedule: Annotated[
        Schedule,
        Meta(
            description="the learning rate after its rise: constant, or falling along a line or a cosine to 0 behind"
            " step learner.steps; a resumed run that raises learner.steps goes on at the longer run's rate"
        ),
    ] = "constant"


class BestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of the best checkpoint, which stays beside the newest ones."""

    metric: Annotated[
        Literal[
            "evaluation/pass_rate",
            "evaluation/pass_at_k",
            "evaluation/reward_mean",
            "evaluation/response_tokens_mean",
        ],
        Meta(description="metric of the run's evaluations"),
    ] = "evaluation/pass_rate"
    mode: Annotated[Literal["max", "min"], Meta(description="whether the largest or the smallest value is best")] = (
        "max"
    )


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the learner's state, and the log of the batches that led to it."""

    every_steps: Annotated[int, Meta(ge=1, description="steps between checkpoints")] = 20
    keep: Annotated[int, Meta(ge=1, description="number of newest checkpoints kept on disk")] = 2
    best: Annotated[
        BestConfig | None,
        Meta(description="the best checkpoint is kept too, as checkpoints/best; null: only the newest are"),
    ] = None
    asynchronous: Annotated[
        bool,
        Meta(description="training goes on while a checkpoint is written; CPU memory holds a copy of it meanwhile"),
    ] = True
    log_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="largest size in bytes of the experience log, from which steps are trained again: files of many"
            " steps, each of 64 MiB or an eighth of this, of which the oldest go first; 0: no log",
        ),
    ] = 8 << 30
    stage_every_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds between checkpoints of a stage without workers, which it repeats at most when it is"
            " killed; 0: it writes one after every step",
        ),
    ] = 60.0


class SftPhaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch of supervised training on {query, response} data."""

    kind: Annotated[str, Meta(description=f"{', '.join(EXAMPLES)}, or your own as package.module:function")]
    path: Annotated[
        str,
        Meta(
            description="file with the fields `query`, which is rendered as prompts are, and `response`; or task names"
        ),
    ] = ""
    options: Annotated[dict[str, Any], Meta(description="further arguments of the source")] = {}
    learning_rate: Annotated[float, Meta(gt=0, description="learning rate, constant after a short linear rise")] = 1e-5
    batch_size: Annotated[int, Meta(ge=1, description="examples in one step")] = 64
    max_steps: Annotated[int, Meta(ge=1, description="largest number of steps in the phase")] = 1000
    until_pass_rate: Annotated[
        float,
        Meta(ge=0, le=1, description="pass rate on held-out prompts at which the phase ends; 0: it runs all steps"),
    ] = 0.0
    gate_every_steps: Annotated[int, Meta(ge=1, description="steps between measurements of the pass rate")] = 25
    gate_prompts: Annotated[int, Meta(ge=1, description="held-out prompts in one measurement")] = 128
    deadline_s: Annotated[
        float, Meta(gt=0, description="longest wait, in seconds, for the next few examples of your own function")
    ] = 60.0


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supervised warm-up before reinforcement learning."""

    phases: Annotated[
        tuple[SftPhaseConfig, ...], Meta(description="phases, which run one after another; none: no warm-up")
    ] = ()


RECORDS = ("file", "arithmetic")


class RecordsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source of records on which a stage trains."""

    kind: Annotated[
        str, Meta(description="file: records are read from `path`; arithmetic: worked chains of the demonstration")
    ] = "file"
    path: Annotated[
        str, Meta(description="file, directory that `datasets` saved, hf:OWNER/NAME or modelscope:OWNER/NAME")
    ] = ""
    options: Annotated[dict[str, Any], Meta(description="how the file is read, or the lengths of the chains")] = {}


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of a run, which starts from the model that an earlier one left."""

    kind: Annotated[str, Meta(description=f"{', '.join(STAGES)}, or your own as package.module:Class")]
    name: Annotated[str, Meta(description="names the stage in the recipe and its overrides; empty: its kind")] = ""
    starts_from: Annotated[
        str,
        Meta(
            description="name of the earlier stage whose model it starts from, or `model`: the recipe's own; empty: the"
            " nearest stage before that leaves a policy"
        ),
    ] = ""
    phases: Annotated[
        tuple[SftPhaseConfig, ...],
        Meta(description="phases of kind=sft, one after another; without phases and options the stage is left out"),
    ] = ()
    options: Annotated[
        dict[str, Any], Meta(description="options of the kind; your own stage declares them as its Options")
    ] = {}

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.default_name)

    @property
    def default_name(self) -> str:
        """The built-in kind, or the name of the user's class."""
        return self.kind.rpartition(":")[2]

    @property
    def has_workers(self) -> bool:
        """True if workers generate the stage's data; it is then the run's learner and the last stage."""
        return self.kind == "rl"

    @property
    def is_over_records(self) -> bool:
        """True for a built-in stage whose options name the records that it trains."""
        return self.kind in OVER_RECORDS or (self.kind == "sft" and bool(self.options))

    @property
    def is_left_out(self) -> bool:
        """True for supervised training without a phase or records, which does not run."""
        return self.kind == "sft" and not self.phases and not self.options


class LayoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of ranks over which the model is split.

    tensor * pipeline * context ranks hold one replica of it together; replicas share a step's batches.
    """

    tensor: Annotated[int, Meta(ge=1, description="ranks that share every matrix (megatron)")] = 1
    pipeline: Annotated[int, Meta(ge=1, description="stages of consecutive layers (megatron)")] = 1
    virtual_pipeline: Annotated[
        int, Meta(ge=1, description="runs of layers that each stage interleaves (megatron)")
    ] = 1
    context: Annotated[int, Meta(ge=1, description="ranks that share the tokens of every sequence")] = 1
    expert: Annotated[int, Meta(ge=1, description="ranks that share the experts of every layer (megatron)")] = 1
    expert_tensor: Annotated[int, Meta(ge=1, description="ranks that share every expert's matrices (megatron)")] = 1


class ComputeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backend's trades of time for memory, and of compilation for speed."""

    recompute: Annotated[
        Literal["none", "selective", "full"],
        Meta(description="activations that the backward pass computes again: none, the cheap ones, or whole layers"),
    ] = "none"
    offload_optimizer: Annotated[bool, Meta(description="the optimizer's state is kept in CPU memory (fsdp)")] = False
    compile: Annotated[bool, Meta(description="layers are compiled with torch.compile (fsdp; recommended on GPUs)")] = (
        False
    )
    cuda_graphs: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="auto: a model of up to 1,073,741,824 parameters on one GPU in bfloat16 replays recorded"
            " kernels, if it has neither experts nor an adapter; always: with an adapter, too, and less work in the"
            " output head, whose speed is not measured; never: they are launched one by one (fsdp)"
        ),
    ] = "auto"


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loop: batch sizes, backend, length of the run."""

    backend: Annotated[str, Meta(description="fsdp, megatron, or your own as package.module:Class")] = "fsdp"
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    device: Annotated[str, Meta(description="device of every rank: cpu or cuda")] = "cpu"
    processes: Annotated[
        int, Meta(ge=1, description="number of ranks, which `headway run` starts on this machine with torchrun")
    ] = 1
    threads: Annotated[
        int, Meta(ge=1, description="CPU threads of one rank, in every stage, and of what it evaluates itself")
    ] = 1
    steps: Annotated[int, Meta(ge=1, description="number of steps in the run")] = 100
    groups_per_step: Annotated[
        int, Meta(ge=1, description="prompts trained in one step, each with its group of samples")
    ] = 32
    group_size: Annotated[int, Meta(ge=1, description="samples of one prompt (G)")] = 8
    micro_batch_tokens: Annotated[int, Meta(ge=1, description="packed tokens of one forward pass")] = 16384
    prefix_sharing: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="tokens that samples share at their beginnings, such as a group's prompt, are computed once:"
            " auto: where that is the quicker plan; always: wherever samples of a prompt share any"
        ),
    ] = "auto"
    updates_per_step: Annotated[
        int, Meta(ge=1, description="optimizer updates in one step, each on a share of its batch")
    ] = 1
    agreement_bound: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None,
        Meta(
            description="mean difference of engine's and learner's logprobs of the first batch's fresh tokens above"
            " which nothing is trained; null: what rounding explains, by number format; 0: they are not compared"
        ),
    ] = None


ABSENT = object()
"""Stands for the value of a key that is not there."""
_MOST = 60


def changed_settings(key: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    """Yields (path, old text, new text) of what differs within a key's value; with an empty `key`, within settings."""
    for path, was, is_ in _differences(key, old, new):
        before, now = _text(was), _text(is_)
        start = max(_same(before, now) - 20, 0)
        yield path, _cut(before, start), _cut(now, start)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, old value, new value) of what differs within a value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            below = f"{path}.{key}" if path else key
            yield from _differences(below, old.get(key, ABSENT), new.get(key, ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, is_) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", was, is_)
    elif old != new:
        yield path, old, new


def _text(value: Any) -> str:
    return "not set" if value is ABSENT else msgspec.json.encode(value).decode()


def _same(one: str, other: str) -> int:
    """Returns how many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cut(text: str, start: int) -> str:
    """Returns a text of at most 60 characters; a longer one from `start` on, a little before it differs."""
    if len(text) <= _MOST:
        return text
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _MOST else f"{rest[: _MOST - 3]}..."

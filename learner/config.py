"""The learner's settings, with defaults."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.errors import ConfigError

PROMPTS = ("arithmetic", "jsonl", "parquet", "datasets", "reasoning_gym")
EXAMPLES = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
STAGES = ("sft", "dpo", "kto", "distill", "reward_model", "rl")
OVER_RECORDS = ("dpo", "kto", "distill", "reward_model")


class RandomModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from random weights, for tests and demonstrations."""

    architecture: Annotated[str, Meta(description="transformers' model type, such as qwen3_moe or qwen3")]
    config: Annotated[dict[str, Any], Meta(description="arguments of its transformers configuration")] = {}
    alphabet: Annotated[
        str, Meta(min_length=1, description="characters of its tokenizer, which has one token for each")
    ]


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


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measure of how much better a response was than could be expected."""

    kind: Annotated[
        str,
        Meta(
            description="group_mean_std, group_mean, leave_one_out, global_mean_std, group_mean_global_std, "
            "best_against_worst (pairs), none (a teacher alone), gae (with a critic), or your own as "
            "package.module:function"
        ),
    ] = "group_mean_std"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the advantage function")] = {}


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The surrogate that is maximized, and the policy that its ratio is anchored to."""

    kind: Annotated[
        str,
        Meta(
            description="ppo_clip, gspo, cispo, ..., or a loss of pairs: dpo, ipo, ... (`headway algorithms`); or your "
            "own as package.module:function"
        ),
    ] = "ppo_clip"
    anchor: Annotated[
        Literal["behavior", "proximal", "reference"],
        Meta(
            description="policy in the ratio's denominator: the one that sampled, the learner's before the step, or, "
            "for losses of pairs, the reference"
        ),
    ] = "behavior"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the objective, such as clip_high")] = {}


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One weight or mask that corrects for lag; several apply in order."""

    kind: Annotated[
        str,
        Meta(description="truncated_is, icepop, ... (`headway algorithms`), or your own as package.module:function"),
    ]
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the correction, such as cap")] = {}


class AggregationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which the losses of tokens become the loss of a batch."""

    kind: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_denominator", "pair_mean"],
        Meta(description="unit over which token losses are averaged (`headway algorithms`)"),
    ] = "token_mean"
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the aggregation")] = {}


class KlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty that holds the policy near a reference."""

    kind: Annotated[Literal["k1", "k2", "k3"], Meta(description="estimator of the divergence, by Schulman's names")] = (
        "k3"
    )
    coefficient: Annotated[
        float, Meta(ge=0, description="factor of the penalty; 0: no penalty and no reference model")
    ] = 0.0
    place: Annotated[
        Literal["loss", "reward"],
        Meta(description="the penalty is added to the loss, or taken from the reward before advantages"),
    ] = "loss"
    ema_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of itself that the reference, also that of a loss of pairs, keeps in a step; the rest "
            "is the policy's. 1: no change",
        ),
    ] = 1.0


class RewardShapingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to rewards before they are compared."""

    overlong_buffer: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens before sampling.max_new_tokens over which DAPO's soft penalty rises; 0: no penalty",
        ),
    ] = 0
    length_normalized: Annotated[
        bool, Meta(description="rewards are divided by the response's length in units of sampling.max_new_tokens")
    ] = False


class DistillationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The term by which the policy learns from a teacher (`teacher.path`) on its own samples."""

    coefficient: Annotated[
        float,
        Meta(ge=0, description="factor of the term; 0: no teacher is needed"),
    ] = 0.0
    place: Annotated[
        Literal["advantage", "loss"],
        Meta(
            description="log teacher - log policy is added to each token's advantage, where the objective may clip it; "
            "or the reverse KL is added to the loss, where nothing clips it"
        ),
    ] = "advantage"
    top_k: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="the teacher's likeliest tokens in each place, over which place=loss takes the divergence, "
            "eight bytes each in every sample; 0: only the sampled token counts",
        ),
    ] = 0
    divergence: Annotated[
        Literal["forward_kl", "reverse_kl", "jsd"],
        Meta(description="what the loss measures over the top_k tokens and the rest of the vocabulary"),
    ] = "reverse_kl"
    beta: Annotated[
        float, Meta(gt=0, lt=1, description="of divergence=jsd: near 0 it is like forward_kl, near 1 like reverse_kl")
    ] = 0.5

    @property
    def candidates(self) -> int:
        """How many of its likeliest tokens the teacher names in each place."""
        return self.top_k if self.coefficient > 0 else 0


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of advantage.kind=gae."""

    path: Annotated[
        str,
        Meta(
            description="directory of the reward model, or stage:NAME, that the critic starts from; empty: the policy's"
            " first weights with a new head"
        ),
    ] = ""
    learning_rate: Annotated[float, Meta(gt=0, description="constant learning rate of the critic")] = 1e-5
    clip: Annotated[
        float,
        Meta(ge=0, description="distance from its old value, in units of the return, to which an update pulls a value"),
    ] = 0.2


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss as a composition; `preset` names a published one, whose values the other keys override."""

    preset: Annotated[
        str, Meta(description="name of a published composition: grpo, gspo, dapo, tis, ... (`headway algorithms`)")
    ] = "grpo"
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    corrections: tuple[CorrectionConfig, ...] = ()
    proximal: Annotated[
        Literal["recompute", "log_linear", "linear"],
        Meta(description="source of proximal logprobs: a forward pass, or interpolation by lag (behavior to current)"),
    ] = "recompute"
    aggregation: AggregationConfig = AggregationConfig()
    kl: KlConfig = KlConfig()
    reward: RewardShapingConfig = RewardShapingConfig()
    distillation: DistillationConfig = DistillationConfig()
    critic: CriticConfig = CriticConfig()
    router_replay: Annotated[
        bool,
        Meta(
            description="each token is trained with the experts that it had when it was sampled "
            "(mixture-of-experts models; vLLM reports experts on GPUs only)"
        ),
    ] = False
    dynamic_sampling: Annotated[
        int,
        Meta(
            ge=0,
            description="largest number of rounds a step in which groups whose samples all got the same reward are "
            "dropped and replaced, as in DAPO; 0: they are kept",
        ),
    ] = 0


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


class BestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint is the best; it stays beside the newest ones."""

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
            description="largest size in bytes of the experience log, from which steps are trained again; 0: no log",
        ),
    ] = 8 << 30


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


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loop: batch sizes, backend, length of the run."""

    backend: Annotated[str, Meta(description="fsdp, megatron, or your own as package.module:Class")] = "fsdp"
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    device: Annotated[str, Meta(description="device of every rank: cpu or cuda")] = "cpu"
    processes: Annotated[
        int, Meta(ge=1, description="number of ranks, which `headway run` starts on this machine with torchrun")
    ] = 1
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one rank")] = 1
    steps: Annotated[int, Meta(ge=1, description="number of steps in the run")] = 100
    groups_per_step: Annotated[
        int, Meta(ge=1, description="prompts trained in one step, each with its group of samples")
    ] = 32
    group_size: Annotated[int, Meta(ge=1, description="samples of one prompt (G)")] = 8
    micro_batch_tokens: Annotated[int, Meta(ge=1, description="packed tokens of one forward pass")] = 16384
    updates_per_step: Annotated[
        int, Meta(ge=1, description="optimizer updates in one step, each on a share of its batch")
    ] = 1


def preset_defaults(name: str) -> dict[str, Any]:
    """Returns the keys that the preset sets, for deploy to merge beneath the user's own. Raises ConfigError."""
    from algorithms.presets import PRESETS

    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; expected one of {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name].algorithm)

"""What the learner can be told, with defaults."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.errors import ConfigError

PROMPTS = ("arithmetic", "jsonl", "parquet", "datasets", "reasoning_gym")
EXAMPLES = ("arithmetic", "jsonl", "parquet", "reasoning_gym")
STAGES = ("sft", "rl")


class RandomModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from random weights, for tests and demonstrations."""

    architecture: Annotated[str, Meta(description="transformers' model type, such as qwen3_moe or qwen3")]
    config: Annotated[dict[str, Any], Meta(description="arguments of its transformers configuration")] = {}
    alphabet: Annotated[str, Meta(min_length=1, description="its tokenizer has one token a character of these")]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is trained."""

    path: Annotated[str, Meta(description="a Hugging Face directory or hub id; empty: `random`")] = ""
    random: Annotated[RandomModelConfig | None, Meta(description="start from random weights instead")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="number format of the forward and backward pass")
    ] = "float32"


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts come from."""

    kind: Annotated[
        str,
        Meta(description=f"{', '.join(PROMPTS)}, or your own as package.module:Class"),
    ]
    path: Annotated[str, Meta(description="file, dataset id or task names (a,b), as the kind wants it")] = ""
    options: Annotated[dict[str, Any], Meta(description="further arguments of the source")] = {}
    shuffle: Annotated[bool, Meta(description="a new order for every epoch, from the run's seed")] = True
    epochs: Annotated[int, Meta(ge=0, description="passes over the prompts; 0: until learner.steps is reached")] = 0
    system_prompt: Annotated[str, Meta(description="put before text prompts of chat models")] = ""
    deadline_s: Annotated[
        float, Meta(gt=0, description="for one call of your own source; one that passes it is killed, and called again")
    ] = 60.0


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much better a response was than could be expected."""

    kind: Annotated[
        str,
        Meta(
            description="group_mean_std, group_mean, leave_one_out, global_mean_std, group_mean_global_std, gae (with "
            "a critic), or your own as package.module:function"
        ),
    ] = "group_mean_std"
    options: Annotated[dict[str, Any], Meta(description="its keyword arguments")] = {}


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The surrogate that is maximized, and the policy that its ratio is anchored to."""

    kind: Annotated[
        str,
        Meta(description="ppo_clip, gspo, cispo, ... (`headway algorithms`), or your own as package.module:function"),
    ] = "ppo_clip"
    anchor: Annotated[
        Literal["behavior", "proximal"],
        Meta(description="ratio against the sampling policy, or against the learner's weights before the step"),
    ] = "behavior"
    options: Annotated[dict[str, Any], Meta(description="its keyword arguments, such as clip_high")] = {}


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One weight or mask on what lag does; several apply in order."""

    kind: Annotated[
        str,
        Meta(description="truncated_is, icepop, ... (`headway algorithms`), or your own as package.module:function"),
    ]
    options: Annotated[dict[str, Any], Meta(description="its keyword arguments, such as cap")] = {}


class AggregationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the losses of tokens become the loss of a batch."""

    kind: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_denominator"],
        Meta(description="what is averaged"),
    ] = "token_mean"
    options: Annotated[dict[str, Any], Meta(description="its keyword arguments")] = {}


class KlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty that holds the policy near a reference."""

    kind: Annotated[Literal["k1", "k2", "k3"], Meta(description="Schulman's estimator")] = "k3"
    coefficient: Annotated[
        float, Meta(ge=0, description="factor of the penalty; 0: off, no reference model is kept")
    ] = 0.0
    place: Annotated[
        Literal["loss", "reward"], Meta(description="added to the loss, or taken from the reward before advantages")
    ] = "loss"
    ema_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="the reference after a step: this much of itself, the rest of the policy; 1: it never changes",
        ),
    ] = 1.0


class RewardShapingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done to rewards before they are compared."""

    overlong_buffer: Annotated[
        int,
        Meta(ge=0, description="DAPO's soft penalty over the last so many tokens of sampling.max_new_tokens; 0: off"),
    ] = 0
    length_normalized: Annotated[
        bool, Meta(description="divide a reward by its response's length, in units of sampling.max_new_tokens")
    ] = False


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of advantage.kind=gae: the policy's first weights with a head of one output."""

    learning_rate: Annotated[float, Meta(gt=0, description="its own, constant")] = 1e-5
    clip: Annotated[float, Meta(ge=0, description="values move at most so far from the old ones in an update")] = 0.2


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss as a composition; `preset` names a published one, whose values the other keys override."""

    preset: Annotated[str, Meta(description="grpo, gspo, dapo, tis, ... (`headway algorithms`)")] = "grpo"
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    corrections: tuple[CorrectionConfig, ...] = ()
    proximal: Annotated[
        Literal["recompute", "log_linear", "linear"],
        Meta(description="the weights before the step: by a forward pass, or between behavior and current by age"),
    ] = "recompute"
    aggregation: AggregationConfig = AggregationConfig()
    kl: KlConfig = KlConfig()
    reward: RewardShapingConfig = RewardShapingConfig()
    critic: CriticConfig = CriticConfig()
    router_replay: Annotated[
        bool,
        Meta(
            description="train each token with the experts that it was given when it was sampled (mixture-of-experts "
            "models; vLLM tells them on GPUs only)"
        ),
    ] = False
    dynamic_sampling: Annotated[
        int,
        Meta(
            ge=0,
            description="DAPO's: groups whose samples all got the same reward are dropped and replaced, in at most so "
            "many rounds a step; 0: off",
        ),
    ] = 0


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW."""

    learning_rate: Annotated[float, Meta(ge=0, description="peak learning rate; 0: a control that learns nothing")] = (
        1e-6
    )
    beta1: Annotated[float, Meta(ge=0, lt=1, description="decay of the first moment")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="decay of the second moment")] = 0.95
    epsilon: Annotated[float, Meta(gt=0, description="added to the denominator")] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, description="decoupled weight decay")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are clipped to this norm")] = 1.0
    warmup_steps: Annotated[int, Meta(ge=0, description="linear rise of the learning rate")] = 0


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the learner's state is made durable, and what is kept of how it came about."""

    every_steps: Annotated[int, Meta(ge=1, description="steps between checkpoints")] = 20
    keep: Annotated[int, Meta(ge=1, description="newest checkpoints kept on disk")] = 2
    asynchronous: Annotated[
        bool, Meta(description="train on while one is written; CPU memory must hold a copy of it meanwhile")
    ] = True
    log_bytes: Annotated[
        int,
        Meta(ge=0, description="the experience log, from which steps are trained again, is kept this small; 0: off"),
    ] = 8 << 30


class SftPhaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch of supervised training on {query, response} data."""

    kind: Annotated[str, Meta(description=f"{', '.join(EXAMPLES)}, or your own as package.module:function")]
    path: Annotated[
        str,
        Meta(
            description="file with the fields `query`, which is put into the chat template as prompts are, and "
            "`response`; or task names"
        ),
    ] = ""
    options: Annotated[dict[str, Any], Meta(description="further arguments of the source")] = {}
    learning_rate: Annotated[float, Meta(gt=0, description="constant after a short linear rise")] = 1e-5
    batch_size: Annotated[int, Meta(ge=1, description="examples a step")] = 64
    max_steps: Annotated[int, Meta(ge=1, description="stop after so many steps at the latest")] = 1000
    until_pass_rate: Annotated[
        float, Meta(ge=0, le=1, description="stop once held-out prompts pass at this rate; 0: run all steps")
    ] = 0.0
    gate_every_steps: Annotated[int, Meta(ge=1, description="steps between measurements of the pass rate")] = 25
    gate_prompts: Annotated[int, Meta(ge=1, description="prompts of one measurement")] = 128
    deadline_s: Annotated[float, Meta(gt=0, description="for the next few examples of your own function")] = 60.0


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supervised warm-up before reinforcement learning."""

    phases: Annotated[tuple[SftPhaseConfig, ...], Meta(description="run one after another; none: no warm-up")] = ()


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of a run, which starts from the model that the one before left."""

    kind: Annotated[str, Meta(description=f"{', '.join(STAGES)}, or your own as package.module:Class")]
    phases: Annotated[
        tuple[SftPhaseConfig, ...], Meta(description="of sft: run one after another; none: the stage is left out")
    ] = ()
    options: Annotated[dict[str, Any], Meta(description="of your own stage: what its Options declare")] = {}

    @property
    def name(self) -> str:
        """The built-in kind, or the name of the user's class."""
        return self.kind.rpartition(":")[2]

    @property
    def has_workers(self) -> bool:
        """Whether workers generate what it trains: then it is the run's learner, and the last stage."""
        return self.kind == "rl"

    @property
    def is_left_out(self) -> bool:
        """Supervised training without a phase is none."""
        return self.kind == "sft" and not self.phases


class LayoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Over how many ranks the model is split.

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
    """What a backend trades between memory and time."""

    recompute: Annotated[
        Literal["none", "selective", "full"],
        Meta(description="activations made again in the backward pass: none, the cheap ones, or whole layers"),
    ] = "none"
    offload_optimizer: Annotated[bool, Meta(description="keep the optimizer's state in CPU memory (fsdp)")] = False
    compile: Annotated[
        bool, Meta(description="compile the layers with torch.compile (fsdp, on a GPU, where it is recommended)")
    ] = False


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loop: batch sizes, backend, length of the run."""

    backend: Annotated[str, Meta(description="fsdp, megatron, or your own as package.module:Class")] = "fsdp"
    layout: LayoutConfig = LayoutConfig()
    compute: ComputeConfig = ComputeConfig()
    device: Annotated[str, Meta(description="cpu or cuda")] = "cpu"
    processes: Annotated[
        int, Meta(ge=1, description="all ranks; `headway run` starts them on this machine (torchrun)")
    ] = 1
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one rank")] = 1
    steps: Annotated[int, Meta(ge=1, description="optimizer steps of the run")] = 100
    groups_per_step: Annotated[int, Meta(ge=1, description="prompts trained in one step")] = 32
    group_size: Annotated[int, Meta(ge=1, description="G, samples of one prompt")] = 8
    micro_batch_tokens: Annotated[int, Meta(ge=1, description="packed tokens of one forward pass")] = 16384
    updates_per_step: Annotated[int, Meta(ge=1, description="optimizer updates that one batch is split into")] = 1


def preset_defaults(name: str) -> dict[str, Any]:
    """The keys that the preset sets, for deploy to merge beneath the user's own. Raises ConfigError."""
    from algorithms.presets import PRESETS

    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; expected one of {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name].algorithm)

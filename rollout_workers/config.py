"""What a worker can be told, with defaults."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ENVIRONMENTS = ("single_turn", "second_try")
REWARDS = ("arithmetic", "math_verify", "reasoning_gym")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which inference engine a worker runs and how large it is."""

    kind: Annotated[
        str,
        Meta(description="embedded (CPU or one GPU), vllm, or your own as package.module:Class"),
    ] = "embedded"
    max_concurrent: Annotated[
        int, Meta(ge=1, description="requests batched together; a worker leases as many, and more as samples end")
    ] = 64
    max_model_len: Annotated[int, Meta(ge=2, description="longest prompt plus response, in tokens")] = 2048
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="number format of the engine's weights")
    ] = "float32"
    device: Annotated[str, Meta(description="torch device of the embedded engine")] = "cpu"
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one engine")] = 1
    options: Annotated[
        dict[str, object], Meta(description="passed to the engine as they are (vLLM engine arguments)")
    ] = {}


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are sampled, for training and for evaluation alike."""

    max_new_tokens: Annotated[
        int,
        Meta(ge=1, description="longest response, in tokens; of several turns: all of them and what is said between"),
    ] = 512
    temperature: Annotated[float, Meta(gt=0, description="the learner divides logits by the same number")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus; 1: off (below 1 biases importance ratios)")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="keep the k likeliest tokens; 0: off")] = 0


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward function and its weight in the sum that is optimized."""

    kind: Annotated[
        str,
        Meta(description=f"{', '.join(REWARDS)}, or your own as package.module:function"),
    ]
    weight: Annotated[float, Meta(description="factor in the sum")] = 1.0
    signature: Annotated[
        Literal["auto", "verl", "trl"],
        Meta(description="how your function is called: compute_score(...) as in verl, or lists as in TRL"),
    ] = "auto"
    deadline_s: Annotated[
        float,
        Meta(
            gt=0, description="for one call of your own function, or of reasoning_gym; made once more if it passes that"
        ),
    ] = 60.0
    processes: Annotated[
        int,
        Meta(ge=1, le=256, description="processes of each worker in which your own function, or reasoning_gym, runs"),
    ] = 1


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes after a turn: the end of the episode, or what the model reads before it goes on."""

    kind: Annotated[
        str,
        Meta(description=f"{', '.join(ENVIRONMENTS)}, or your own as package.module:Class"),
    ] = "single_turn"
    options: Annotated[dict[str, object], Meta(description="of that kind, or for your own class")] = {}
    deadline_s: Annotated[
        float, Meta(gt=0, description="for one call of your own class; made once more if it passes that")
    ] = 60.0
    processes: Annotated[
        int, Meta(ge=1, le=256, description="processes of each worker in which your own class runs")
    ] = 1


class WorkersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of rollout workers."""

    count: Annotated[int, Meta(ge=1, description="worker processes that `headway run` starts")] = 2
    devices: Annotated[
        tuple[int | str, ...],
        Meta(
            description="GPUs as CUDA_VISIBLE_DEVICES names them; each worker in turn gets the next one, or as many as "
            "vLLM's tensor_parallel_size * pipeline_parallel_size; '2,3': both to one worker; none: every worker sees "
            "all"
        ),
    ] = ()
    heartbeat_s: Annotated[float, Meta(gt=0, description="how often a worker reports and renews its leases")] = 1.0
    max_restarts: Annotated[int, Meta(ge=0, description="restarts of one worker before the run is stopped")] = 5
    patience_s: Annotated[
        float,
        Meta(ge=0, description="how long a worker that finds its run ended waits for a learner to resume it"),
    ] = 60.0
    probe_swaps: Annotated[bool, Meta(description="verify the engine's logprobs after every weight swap")] = True
    segment_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="store a running sample's tokens every so many, so that a crash loses no more; 0: by time only",
        ),
    ] = 512
    segment_s: Annotated[
        float,
        Meta(
            ge=0,
            description="store them also after so long, if there are new ones; both 0: it starts anew elsewhere, also "
            "after broker.lease_hold_s",
        ),
    ] = 10.0


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pass rate on held-out prompts."""

    prompts: Annotated[int, Meta(ge=0, description="held-out prompts, one sample each; 0: no evaluation")] = 256
    every_steps: Annotated[
        int, Meta(ge=0, description="evaluate also every so many steps; 0: before and after only")
    ] = 0
    pass_reward: Annotated[float, Meta(description="a response passes with at least this reward")] = 1.0

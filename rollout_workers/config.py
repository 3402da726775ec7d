"""The settings of rollout workers, with defaults."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ENVIRONMENTS = ("single_turn", "second_try")
READERS = ("arithmetic", "math_verify", "reasoning_gym")
"""Rewards that can say which prompts they will not be able to judge."""
REWARDS = (*READERS, "reward_model")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inference engine that a worker runs, and its size."""

    kind: Annotated[
        str,
        Meta(description="embedded (CPU or one GPU), vllm, sglang, or your own engine as package.module:Class"),
    ] = "embedded"
    max_concurrent: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="requests that one engine runs at a time; a worker leases as many samples; null: as many as fit"
            " its KV cache (vLLM and SGLang on GPUs; else 64), and of the run's samples this worker's share at most"
        ),
    ] = None
    max_model_len: Annotated[int, Meta(ge=2, description="longest prompt plus response, in tokens")] = 2048
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="number format of the engine's weights")
    ] = "float32"
    device: Annotated[str, Meta(description="torch device of the embedded engine")] = "cpu"
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one engine")] = 1
    options: Annotated[
        dict[str, object],
        Meta(description="arguments of vLLM, SGLang or your own engine, as they are; the embedded one has none"),
    ] = {}


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which an engine samples responses, in training and in evaluation."""

    max_new_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="longest response, in tokens; an episode's turns and what its environment says count together",
        ),
    ] = 512
    temperature: Annotated[float, Meta(gt=0, description="divisor of the logits, for engine and learner")] = 1.0
    top_p: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="probability mass that is sampled from; 1: all of it (less biases importance ratios)",
        ),
    ] = 1.0
    top_k: Annotated[
        int, Meta(ge=0, description="number of likeliest tokens that are sampled from; 0: all of them")
    ] = 0
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="with a seed a response depends on it, the weights, its prompt and its number alone, whichever"
            " worker samples it, on engines that honour seeds; null: engines draw freely"
        ),
    ] = None
    keep_special_tokens: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="special tokens that stay in the text that rewards and environments read, such as '<think>';"
            " []: none, as in verl and TRL; null: all but those that end or pad a text"
        ),
    ] = None


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward function, and its weight in the sum that training optimizes."""

    kind: Annotated[
        str,
        Meta(description=f"{', '.join(REWARDS)}, or your own as package.module:function"),
    ]
    weight: Annotated[float, Meta(description="factor of this function's score in the sum")] = 1.0
    path: Annotated[
        str,
        Meta(description="of kind reward_model: its directory, a hub id, or stage:NAME for the model of that stage"),
    ] = ""
    mean: Annotated[
        float, Meta(description="subtracted from the score before it is weighed, as measured on held-out pairs")
    ] = 0.0
    std: Annotated[float, Meta(gt=0, description="the difference to `mean` is divided by this")] = 1.0
    clip: Annotated[
        float, Meta(ge=0, description="what comes of that is cut to [-clip, clip] before it is weighed; 0: it is not")
    ] = 0.0
    signature: Annotated[
        Literal["auto", "verl", "trl"],
        Meta(description="how your function is called: as verl calls compute_score, or with lists as TRL does"),
    ] = "auto"
    deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds for one call of your own function or of reasoning_gym, and for which one scorer may"
            " have a response for a reward_model; a longer call is repeated",
        ),
    ] = 60.0
    processes: Annotated[
        int,
        Meta(ge=1, le=256, description="processes of each worker that run your own function, or reasoning_gym"),
    ] = 1
    trial: Annotated[
        bool,
        Meta(
            description="your own function is called once before a run starts, with the first row and a made-up"
            " response; false: it is not, as it costs money or cannot be called yet"
        ),
    ] = True
    unreadable: Annotated[
        Literal["refuse", "skip"],
        Meta(
            description="what becomes of rows with a ground truth that arithmetic, math_verify or reasoning_gym cannot"
            " read: the run is refused, or passes over them and says how many"
        ),
    ] = "refuse"


class ScorerEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine that runs the models of scorers."""

    kind: Annotated[
        str,
        Meta(
            description="transformers (CPUs and GPUs), vllm (its pooling runner for reward models, its prompt logprobs"
            " for teachers), or your own as package.module:Class"
        ),
    ] = "transformers"
    options: Annotated[
        dict[str, object],
        Meta(description="arguments of vLLM or of your own class, as they are; transformers has none"),
    ] = {}


class ScorersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that hold models which score responses: those of each reward_model and of the teacher."""

    count: Annotated[int, Meta(ge=0, description="processes that `headway run` starts for each scorer")] = 1
    engine: ScorerEngineConfig = ScorerEngineConfig()
    device: Annotated[str, Meta(description="torch device of the models, cpu or cuda")] = "cpu"
    devices: Annotated[
        tuple[int | str, ...],
        Meta(description="GPUs as CUDA_VISIBLE_DEVICES names them; each process in turn gets the next one"),
    ] = ()
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="number format of the models' weights")
    ] = "float32"
    batch_tokens: Annotated[
        int,
        Meta(ge=1, description="most tokens of one batch, padding included; a longer response is a batch of its own"),
    ] = 16384
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one process")] = 1


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model whose logprobs of the sampled tokens every trajectory gets."""

    path: Annotated[
        str, Meta(description="its directory, a hub id, or stage:NAME for the model of that stage; none: no teacher")
    ] = ""
    deadline_s: Annotated[
        float, Meta(gt=0, description="seconds for which one scorer may have a response; then another one gets it")
    ] = 60.0


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment that ends an episode after a turn, or says what the model reads before it goes on."""

    kind: Annotated[
        str,
        Meta(description=f"{', '.join(ENVIRONMENTS)}, or your own as package.module:Class"),
    ] = "single_turn"
    options: Annotated[dict[str, object], Meta(description="options of that kind, or arguments of your own class")] = {}
    deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds for one call of your own class; a longer call is repeated once",
        ),
    ] = 60.0
    max_says: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="most characters, or token ids, that your own class may say after a turn; more is not said, as"
            " if there were no room for it, and counted",
        ),
    ] = 100_000
    processes: Annotated[int, Meta(ge=1, le=256, description="processes of each worker that run your own class")] = 1


class AgentFormatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How conversations are written as the model reads them, and what it wrote is read."""

    kind: Annotated[
        str,
        Meta(description="auto (by the template of the tokenizer), or a format by its name"),
    ] = "auto"
    options: Annotated[dict[str, object], Meta(description="options of that format")] = {}


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent that plays episodes, in the place of an environment."""

    kind: Annotated[
        str,
        Meta(
            description="a task or an adapter by its name, as the guide on agents has them, or your own as"
            " package.module:rollout; empty: no agent, an environment answers turns"
        ),
    ] = ""
    options: Annotated[dict[str, object], Meta(description="options of that kind, or arguments of your own class")] = {}
    format: AgentFormatConfig = AgentFormatConfig()
    max_turns: Annotated[int, Meta(ge=1, le=10_000, description="most turns of an episode, branches included")] = 64
    max_turn_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="longest answer of one turn; null: what is left of sampling.max_new_tokens, which counts all"
            " that an episode reads and samples after its first prompt"
        ),
    ] = None
    turn_s: Annotated[float, Meta(gt=0, description="seconds for one answer of the model, waiting included")] = 300.0
    episode_s: Annotated[float, Meta(gt=0, description="seconds for a whole episode, scoring included")] = 1800.0
    ignore_sampling: Annotated[
        bool,
        Meta(
            description="take calls that ask for another temperature, top_p or seed than sampling.*, and sample by"
            " sampling.* all the same; else such a call is refused"
        ),
    ] = False
    on_failure: Annotated[
        Literal["again", "zero"],
        Meta(
            description="an episode whose agent fails: again: it begins anew, and a worker whose agent fails again and"
            " again ends; zero: its turns are trained with a reward of 0, and failures are counted by their reason"
        ),
    ] = "again"
    episodes_per_place: Annotated[
        int,
        Meta(ge=1, le=1000, description="most episodes of a worker for each request that its engine runs at a time"),
    ] = 8
    processes: Annotated[int, Meta(ge=1, le=256, description="processes of each worker that run agents")] = 1
    host: Annotated[str, Meta(description="address at which a worker's endpoint listens")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="its port; 0: any that is free")] = 0


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more pool of workers, whose engines may differ from the recipe's."""

    name: Annotated[str, Meta(min_length=1, description="name of the pool, for `headway scale --pool NAME`")]
    count: Annotated[int, Meta(ge=0, description="worker processes to begin with")] = 1
    engine: Annotated[
        dict[str, Any], Meta(description="keys of engine.* with other values in this pool, such as kind or options")
    ] = {}
    devices: Annotated[tuple[int | str, ...], Meta(description="GPUs of the pool, as workers.devices names them")] = ()


class WorkersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of rollout workers."""

    count: Annotated[int, Meta(ge=0, description="workers that `headway run` starts, in the pool `workers`")] = 2
    pools: Annotated[tuple[PoolConfig, ...], Meta(description="further pools, each with an engine of its own")] = ()
    devices: Annotated[
        tuple[int | str, ...],
        Meta(
            description="GPUs as CUDA_VISIBLE_DEVICES names them; each worker in turn gets the next one, or as many as "
            "vLLM's tensor_parallel_size * pipeline_parallel_size; '2,3' gives both to one worker; without any, every "
            "worker sees all GPUs"
        ),
    ] = ()
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="seconds between two reports of a worker, which renew its leases too")
    ] = 1.0
    max_restarts: Annotated[int, Meta(ge=0, description="restarts of one worker before the run is stopped")] = 5
    engine_errors: Annotated[
        int,
        Meta(
            ge=1,
            description="errors of an engine within 10 min at which its worker hands its work back and is replaced",
        ),
    ] = 3
    stall_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without a token after which an engine with requests counts as hanging, and its worker "
            "is replaced: many times the time between two tokens, prompts and compiling included; 0: never",
        ),
    ] = 600.0
    slow_factor: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="share of the median pace of its pool, of at least three busy workers, below which a worker "
            "counts as slow and is replaced; 0: never",
        ),
    ] = 0.25
    slow_window_s: Annotated[
        float, Meta(gt=0, description="seconds over which a worker's pace is compared with that of its pool")
    ] = 120.0
    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="each worker serves metrics for Prometheus on the first free port from this one on; 0: none",
        ),
    ] = 0
    metrics_host: Annotated[str, Meta(min_length=1, description="address on which workers serve metrics")] = "127.0.0.1"
    patience_s: Annotated[
        float,
        Meta(ge=0, description="seconds that a worker which finds its run ended waits for a learner to resume it"),
    ] = 60.0
    probe_swaps: Annotated[
        bool, Meta(description="whether a worker verifies the engine's tensors and logprobs at every weight swap")
    ] = True
    segment_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="new tokens of a running sample after which a worker stores them; 0: by time only",
        ),
    ] = 512
    segment_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds after which a worker stores new tokens at the latest; 0: by number; both 0: never "
            "(then a sample starts anew elsewhere, also after broker.lease_hold_s)",
        ),
    ] = 10.0


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evaluation on held-out prompts."""

    prompts: Annotated[int, Meta(ge=0, description="held-out prompts; 0: no evaluation")] = 256
    samples: Annotated[
        int,
        Meta(ge=1, description="samples of each prompt; pass@1 is the mean over all, pass@k asks for one that passed"),
    ] = 1
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="temperature of evaluations; 0: greedy; null: sampling.temperature"),
    ] = None
    every_steps: Annotated[
        int, Meta(ge=0, description="steps between two evaluations; 0: only before and after training")
    ] = 0
    pass_reward: Annotated[float, Meta(description="a response passes with at least this reward")] = 1.0
    where: Annotated[
        Literal["learner", "workers"],
        Meta(
            description="learner: an embedded engine in the learner's process, which does not train meanwhile; "
            "workers: the rollout workers, beside training"
        ),
    ] = "learner"
    hold_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds for which a worker that evaluates keeps its version at most, instead of newer ones",
        ),
    ] = 120.0

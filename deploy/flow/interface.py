"""The names that users may import from Headway, seam by seam."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One name of the interface."""

    path: str
    """`package.module:name`."""
    members: tuple[str, ...] = ()
    """The members that belong to the interface; none: all public ones."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that users write: the key of a recipe that names it, and the names that it takes to write it."""

    title: str
    key: str
    contract: str
    """Says how Headway makes and calls it, in which process, and what happens when it fails."""
    example: str
    """The file of the example, below `example/`."""
    names: tuple[Name, ...]
    """Those that the user writes first, then those that are given to it."""


INTERFACE = (
    Part(
        title="A prompt source",
        key="prompts.kind",
        contract="The learner makes the class as `Class(path=, seed=, **options)`, with `prompts.path`, `run.seed` and"
        " `prompts.options`, in a process of its own. A call that raises or passes `prompts.deadline_s` is made once"
        " more; a second failure ends the run. Equal arguments must give equal items: a resumed run asks again.",
        example="my_flow/prompts.py",
        names=(Name("headway.learner.data.prompts.base:PromptSource"), Name("headway.learner.data.prompts.base:Item")),
    ),
    Part(
        title="A reward",
        key="rewards[].kind",
        contract="Each worker calls the function in processes of its own, from several threads at once; it may be"
        " `async def`. A call that raises or passes `rewards[].deadline_s` is made once more; then the sample is"
        " generated anew. [Your own task](../guides/own-task.md#custom-reward-function) has the other signature,"
        " TRL's.",
        example="my_flow/rewards.py",
        names=(Name("headway.rollout_workers.rewards.base:RewardFunction"),),
    ),
    Part(
        title="An environment",
        key="environment.kind",
        contract="Each worker makes the class as `Class(**options)` in processes of its own, and calls `step` from"
        " several threads at once; `step` may be `async def`, and `close` may be missing. The object keeps nothing"
        " between two turns. Failures are those of a reward."
        " [Multi-turn environments](../guides/environments.md) says more.",
        example="my_flow/environment.py",
        names=(
            Name("headway.rollout_workers.environments:Environment", ("max_turns", "step")),
            Name("headway.rollout_workers.environments:Episode"),
            Name("headway.rollout_workers.environments:Step"),
            Name("headway.broker.schema:Prompt", ("text", "ground_truth", "data_source", "extra_info", "token_ids")),
        ),
    ),
    Part(
        title="An objective",
        key="algorithm.objective.kind",
        contract="Every rank of the learner calls the function for each micro-batch, with"
        " `algorithm.objective.options` as keyword arguments. It changes none of its arguments. What it raises ends"
        " the learner.",
        example="my_flow/objective.py",
        names=(
            Name("headway.algorithms.objectives.base:TokenObjective"),
            Name("headway.algorithms.tokens:Tokens"),
            Name("headway.algorithms.metrics:Metrics"),
            Name("headway.algorithms.metrics:masked_mean"),
        ),
    ),
    Part(
        title="A stage",
        key="stages[].kind",
        contract="Every rank of the learner makes the class as `Class(parts, options)`, with `options` as the class's"
        " own `Options`, and then calls `run` and `save`. All calls are collective. A stage that was stopped or killed"
        " is made again in the same directory and goes on from what `parts.checkpoints.load()` returns.",
        example="my_flow/stage.py",
        names=(
            Name("headway.learner.stages.base:Stage"),
            Name("headway.learner.stages.base:StageMetrics"),
            Name("headway.learner.stages.base:Progress"),
            Name("headway.learner.stages.base:StageParts"),
            Name("headway.learner.backends.base:Backend", ("step", "logprobs", "named_tensors")),
            Name("headway.learner.ranks:Ranks", ("is_first", "replica", "replicas", "sum", "max", "any")),
            Name("headway.learner.stages.stage_checkpoints:StageCheckpoints", ("load", "keep_if_due", "keep", "leave")),
            Name("headway.learner.data.examples:Example"),
            Name("headway.learner.stages.sft_phases:tokenize"),
            Name("headway.learner.batching.packing:pack"),
            Name("headway.learner.objective.objective:supervised_loss"),
        ),
    ),
    Part(
        title="A metric sink",
        key="metrics[].kind",
        contract="The learner's first rank makes the class as `Class(**options)` and calls it from one thread. An error"
        " is logged, and training goes on, unless the sink `is_record`."
        " [Metrics and plots](../guides/metrics.md#a-sink-of-your-own) says more.",
        example="my_flow/sink.py",
        names=(
            Name("headway.deploy.observe.sinks.base:MetricSink"),
            Name("headway.deploy.observe.sinks.base:SinkRun"),
            Name("headway.deploy.run.events:Event"),
            Name("headway.deploy.run.events:StepEvent"),
            Name("headway.deploy.run.events:EvaluationEvent"),
            Name("headway.deploy.run.events:StageEvent"),
            Name("headway.deploy.run.events:HeartbeatEvent", ("incarnation", "step", "time_s", "workers", "queues")),
        ),
    ),
)

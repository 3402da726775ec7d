"""The metrics of a learner step, as written to metrics.jsonl."""

import msgspec


class LagFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of one bucket of lag in one step; a figure is None where nothing of that lag has it."""

    trajectories: int
    """Trajectories whose oldest trained token is of this lag."""
    tokens: int
    """Trained tokens of this lag."""
    reward_mean: float | None = None
    """The mean reward of these trajectories."""
    ratio_mean: float | None = None
    """The mean ratio of the learner's policy to the sampler's, over these tokens."""
    ess: float | None = None
    """The effective sample size of these tokens as a share of them: 1 where the policies agree."""
    clip_fraction: float | None = None
    """The share of these tokens that the objective clipped; None: it clips nothing."""
    mask_fraction: float | None = None
    """The share of these tokens that corrections masked."""
    reverse_kl: float | None = None
    """The mean of log policy - log teacher over these tokens, of distillation."""


class AgentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the episodes that agents played, over all samples of the step's groups."""

    episodes: int
    turns_mean: float
    """The mean number of an episode's turns."""
    turns_max: int
    tool_calls_mean: float
    """The mean number of tools that an episode's answers call."""
    tool_s_mean: float
    """The mean time in which an episode asked nothing of the model: its tools or its agent worked."""
    versions_mean: float
    """The mean number of weight versions that sampled an episode."""
    fork_fraction: float
    """The share of turns whose conversation does not go on from the tokens of an earlier one."""
    reread_fraction: float
    """The share of all tokens, read and sampled, that forks read after the place where they break off."""
    unseen_fraction: float
    """The share of turns that are not trained, as the agent never got them, or did not ask for them when it was run
    again."""
    resumed_calls: int = 0
    """Calls that were answered with a turn of an earlier attempt."""
    repeated_calls: int = 0
    """Calls that were answered with a turn of the same attempt."""
    lost_calls: int = 0
    """Calls that an earlier worker had not answered when it was lost."""
    restarted: int = 0
    """Episodes that began anew, as their agent cannot repeat what it did."""
    over_budget: int = 0
    """Calls for which the episode had no turn or token left."""
    turn_timeouts: int = 0
    """Calls without an answer within `agent.turn_s`."""
    failures: dict[str, int] = {}
    """Episodes that failed and got 0, by reason; those that begin anew are in the workers' reports alone."""
    refused_calls: dict[str, int] = {}
    """Requests to the endpoint that got an error, by reason."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one learner step, as written to metrics.jsonl and shown live."""

    incarnation: int
    """The incarnation of the learner that made the step."""
    step: int
    """The step's number: step 0 turns the first weights into version 1."""
    total_steps: int
    """The steps of the run: `learner.steps`."""
    time_s: float
    """The time since this learner started its loop."""
    reward_mean: float
    """The mean reward of all trajectories of the step's groups."""
    reward_std: float
    """The standard deviation of the same rewards."""
    reward: dict[str, float] = {}
    """The mean of each reward function's own score, by its name, of its further measures, as `name/part`, and of an
    environment's, as `environment/part`; each over the samples of the step's groups that have it."""
    reward_samples: dict[str, int] = {}
    """The samples over which each of these means is taken."""
    flat_groups: float | None = None
    """The share of the step's groups whose samples all got the same reward; None: an earlier version of Headway wrote
    the line."""
    truncated: float | None = None
    """The share of all samples of the step's groups that ended at their longest length, and not by themselves; None: an
    earlier version of Headway wrote the line."""
    truncated_samples: int | None = None
    """Their number."""
    truncated_reward_mean: float | None = None
    """Their mean reward; None: there are none."""
    response_tokens_mean: float
    """The mean length of a trained response."""
    lag_mean: float
    """The lag of a trained trajectory's oldest trained token, averaged over the trajectories."""
    lag_max: int
    """The largest lag of a trained token."""
    lag_histogram: dict[int, int]
    """Trained trajectories by the lag of their oldest trained token."""
    token_lag_histogram: dict[int, int] = {}
    """Trained tokens by their lag."""
    response_length_histogram: dict[int, int] = {}
    """Trained samples by the tokens of their response, up to a power of two."""
    by_lag: dict[int, LagFigures] = {}
    """Figures of each lag that was trained: rewards, ESS, shares clipped and masked. The key is the largest lag of a
    bucket: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512 or 1000. Only buckets that occur are there."""
    groups: int
    """Groups that the step trained."""
    trajectories: int
    """Samples that the step trained."""
    untrained_trajectories: int = 0
    """Further samples of the step's groups: those that a loss of pairs leaves out, and truncated ones with
    `algorithm.mask_truncated`."""
    long_prompts: int = 0
    """Prompts that this learner has passed over so far, since they leave no room for a response."""
    mixed_version_trajectories: int
    """Trained samples that weights of several versions sampled."""
    trained_tokens: int
    """Response tokens in the loss."""
    packed_tokens: int
    """Prompt and response tokens that went through the model."""
    micro_batches: int
    """Forward and backward passes, over all replicas of the model."""
    packing_efficiency: float | None = None
    """The share of `learner.micro_batch_tokens` that the mean micro-batch filled; tokens that are computed once count
    once. It is above 1 where sequences are longer than that."""
    loss: float | None
    """The loss; None: it was not finite."""
    grad_norm: float | None
    """The norm of the gradient; None: it was not finite, so the update was skipped."""
    learning_rate: float
    """The optimizer's learning rate at this step."""
    algorithm: dict[str, float]
    """The metrics of the loss: ESS, clip and mask fractions, KL."""
    agent: AgentFigures | msgspec.UnsetType = msgspec.UNSET
    """Figures of episodes that agents played; absent in a run without an agent."""
    waited_mean_s: float | None = None
    """For how long the step's groups waited for the learner once they were ready, in the mean; None: the batch came
    from the log."""
    waited_max_s: float | None = None
    """The longest of these times."""
    broker_calls: int = 0
    """Calls of the learner to the broker that were answered since the step before."""
    broker_s: float = 0.0
    """The sum of the times until they were answered."""
    take_s: float
    """The time to wait for the batch and read it."""
    train_s: float
    """The time for packing, proximal logprobs, forward and backward passes, and updates."""
    publish_s: float
    """The time until the weights are gathered and the previous ones announced; they are sent beside the next step."""
    checkpoint_s: float
    """The time for which a checkpoint held up the loop."""
    step_s: float
    """The time of the whole step."""

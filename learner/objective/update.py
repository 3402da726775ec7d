"""One batch makes one weight version: rewards, advantages, packing, proximal logprobs, loss, optimizer."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from typing import Generic, TypeVar, overload

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.metrics import summarize, summarize_by_lag
from headway.algorithms.ratios import KL_ESTIMATORS
from headway.algorithms.returns import kl_shaped
from headway.broker.schema import Group, Trajectory
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import abilities_of
from headway.learner.backends.base import Backend, CheckpointPart, TrainableModel
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing, Row, Unit, pack_units
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.batching.packing import PackableSequence, from_trajectory, mask_and_lags, rollouts_of
from headway.learner.batching.router_replay import Routing
from headway.learner.config import LearnerConfig, OptimizerConfig, learning_rate
from headway.learner.ranks import Ranks

from .composition import credits_turns, needs_teacher, open_advantage, open_turn_advantage, pairs_of
from .credit import token_rewards, turn_advantages
from .critic import Critic, outcome_rewards
from .logprob_agreement import LogprobAgreement
from .loss import Objective, whole_report
from .shaping import RewardStats, group_advantages, is_truncated, reward_stats, shaped_rewards, trajectories_of

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A batch with its advantages, the same on every rank; for a critic the rewards are in their place."""

    sequences: tuple[PackableSequence, ...]
    """The sequences that the step trains, those of a rollout one after another (`packing.rollouts_of`); for a loss of
    pairs each chosen rollout before its rejected one."""
    trajectories: tuple[Trajectory, ...]
    """The trajectory of each rollout. A loss of pairs leaves out all others of the step's groups, and
    `algorithm.mask_truncated` those that were truncated."""
    rewards: RewardStats
    """The rewards of all trajectories of the step's groups."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Counts of the pairs that the step trains and of the groups that gave none; empty for other losses."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The outcome of one batch's updates."""

    loss: float
    """The mean loss over the batch's optimizer updates."""
    grad_norm: float
    """The largest gradient norm of the updates, before clipping; not finite if an update was skipped."""
    learning_rate: float
    micro_batches: int
    """The number of micro-batches of all replicas together."""
    computed_tokens: int
    """The tokens of all micro-batches; those that sequences share count once where they are computed once."""
    budget_tokens: int
    """The tokens for which these micro-batches have room."""
    algorithm: dict[str, float]
    by_lag: dict[int, dict[str, float]]
    """Metrics of the trained tokens of each bucket of lag, by its largest lag."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The inputs of one optimizer update; lists have an entry for every micro-batch of this rank."""

    batches: list[PackedBatch]
    reference: list[torch.Tensor] | None
    returns: list[torch.Tensor]
    values: list[torch.Tensor]
    estimates: dict[str, float]
    """Metrics of how well the critic's values explain the returns, over the whole step."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The settings of all updates of a run, the same on every rank."""

    algorithm: AlgorithmConfig
    learner: LearnerConfig
    optimizer: OptimizerConfig
    temperature: float
    max_new_tokens: int
    max_lag: int
    cost: CostModel = DEFAULT_COST
    """Balances replicas."""
    routing: Routing | None = None
    """The sizes of a model whose routers replay the engine's choices."""
    agreement_bound: float = 0.0
    """The bound of `LogprobAgreement`."""
    is_cut: bool = False
    """As for `LogprobAgreement`."""


class Updater:
    """Turns batches into optimizer updates. Collective over the ranks.

    `reference` is needed for a KL penalty and for most losses of pairs, `critic` for advantages by generalized
    estimation.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Ranks,
        objective: Objective,
        reference: Backend | None,
        critic: Critic | None = None,
        *,
        config: UpdateConfig,
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._objective = objective
        self._first_objective = objective.of_first_update()
        self._reference = reference
        self._critic = critic
        self._config = config
        self._advantage = None if critic else open_advantage(config.algorithm)
        self._kl = config.algorithm.kl
        is_in_reward = self._kl.coefficient > 0 and self._kl.place == "reward"
        self._reward_kl = KL_ESTIMATORS[self._kl.kind] if reference and is_in_reward else None
        self._prefix_sharing = prefix_sharing_of(config.learner)
        self._logprob_agreement = LogprobAgreement(ranks, config.agreement_bound, is_cut=config.is_cut)

    @property
    def models(self) -> list[TrainableModel]:
        """All models on this rank's device."""
        critics = [] if self._critic is None else [self._critic.backend]
        references = [] if self._reference is None else [self._reference]
        return [self._backend, *references, *critics]

    @property
    def extra_models(self) -> dict[str, CheckpointPart]:
        """The models that a checkpoint holds beside the policy, as the algorithm changes them."""
        models: dict[str, CheckpointPart] = {}
        if self._critic is not None:
            models["critic"] = self._critic
        if self._reference is not None and self._kl.ema_decay < 1:
            models["reference"] = self._reference
        return models

    def load(self, checkpoint: Path) -> None:
        """Loads the models `extra_models` the policy from a checkpoint; one that the checkpoint lacks starts anew."""
        for name, model in self.extra_models.items():
            if (checkpoint / name).is_dir():
                model.load(checkpoint / name)
            else:
                log.warning("%s has no %s: it starts from the first weights", checkpoint, name)

    def compute_advantages(self, groups: Sequence[Group], step: int) -> ScoredBatch:
        """Computes advantages within each group, and chooses what is trained; tokens over the staleness bound become
        context. A rollout counts once in its group, however many rows and turns it has.

        With `algorithm.mask_truncated` truncated responses are compared and not trained: their rewards count in their
        group, their tokens in no sum and no denominator of a loss. A pair with one of them is not trained.

        Source: overlong filtering, DAPO, Yu et al. 2025 (arXiv:2503.14476), section 3.4, which masks their loss.
        Rewards and the mean over tokens are as with TRL's mask_truncated_completions (1.16); means over sequences
        count truncated ones there.
        """
        rewards_S = shaped_rewards(groups, self._config.algorithm.reward, self._config.max_new_tokens)
        if self._critic is None and self._reward_kl is not None:
            rewards_S = self._less_kl(rewards_S, self._rollouts(groups, [0.0] * len(rewards_S), step))
        advantages = rewards_S.tolist()
        if self._advantage is not None:
            advantages = group_advantages(groups, rewards_S, self._advantage)
        of_turns = self._of_turns(groups, rewards_S, step)
        rollouts, trajectories = self._rollouts(groups, of_turns or advantages, step), trajectories_of(groups)
        may_train = [not (self._config.algorithm.mask_truncated and is_truncated(one)) for one in trajectories]
        trained, figures = [index for index, may in enumerate(may_train) if may], dict[str, float]()
        if self._objective.is_of_pairs:
            has_loss = [may and _has_loss(rows) for may, rows in zip(may_train, rollouts, strict=True)]
            pairs = pairs_of(groups, advantages, has_loss)
            trained = [index for pair in pairs for index in pair]
            figures = {"pairs": len(pairs), "groups_without_pair": len(groups) - len(pairs)}
        return ScoredBatch(
            sequences=tuple(sequence for index in trained for sequence in rollouts[index]),
            trajectories=tuple(trajectories[index] for index in trained),
            rewards=reward_stats(groups),
            figures=figures,
        )

    def pack(self, sequences: Sequence[PackableSequence]) -> Sequence[list[PackedBatch]]:
        """Returns this rank's micro-batches of each of the step's `updates_per_step` updates; rollouts and pairs stay
        whole. Those of later updates are packed meanwhile."""
        units: list[Unit] = list(rollouts_of(sequences))
        if self._objective.is_of_pairs:
            units = [[*chosen, *rejected] for chosen, rejected in zip(units[::2], units[1::2], strict=True)]
        parts = split(units, self._config.learner.updates_per_step)
        return Prefetcher([partial(self._packed, part) for part in parts])

    def update(self, packed: Sequence[list[PackedBatch]], step: int, *, is_of_this_learner: bool = True) -> Update:
        """Makes an optimizer update of each part of a packed step; proximal logprobs are those before the first of
        them, which needs no forward pass for its own. `is_of_this_learner`: whether no token of the step was sampled by
        the weights that the learner before a resume had at this step, which may differ from the present ones. Raises
        DisagreementError, with nothing trained, where engine and learner compute different models."""
        agreement = (
            self._logprob_agreement.compare(packed[0], self._logprobs, step, is_of_this_learner=is_of_this_learner)
            if packed
            else {}
        )
        rate = self.learning_rate(step)
        parts, losses, norms, reports, critic_reports = [], [], [], [], list[dict[str, float]]()
        for objective, part, proximal_logprobs in self._updates(packed):
            parts.append(part)
            current_logprobs = self._logprobs(part.batches) if objective.needs_current else None
            token_loss = objective.token_loss(
                part.batches, self._ranks.sum, proximal_logprobs, part.reference, current_logprobs
            )
            loss, grad_norm, report = self._backend.step(part.batches, token_loss, self._config.temperature, rate)
            losses.append(loss)
            norms.append(grad_norm)
            reports += report
            if self._critic is not None:
                critic_reports.append(self._critic.update(part.batches, part.returns, part.values))
        # A rank without sequences has nothing to report, and must still take part in the sums.
        names = self._ranks.share_bytes(msgspec.msgpack.encode(sorted({name for report in reports for name in report})))
        reports.append(dict.fromkeys(msgspec.msgpack.decode(names, type=list[str]), 0.0))
        if self._reference is not None and self._kl.ema_decay < 1:
            self._reference.follow(self._backend, self._kl.ema_decay)
        whole = whole_report(reports, self._ranks.sum, self._ranks.max)
        micro_batches = self._ranks.replicas * sum(len(part.batches) for part in parts)
        return Update(
            loss=sum(losses) / len(losses),
            grad_norm=next((norm for norm in norms if not math.isfinite(norm)), max(norms)),
            learning_rate=rate,
            micro_batches=micro_batches,
            computed_tokens=self._computed_tokens(parts),
            budget_tokens=micro_batches * self._config.learner.micro_batch_tokens,
            algorithm={**summarize(whole), **parts[0].estimates, **_means(critic_reports), **agreement},
            by_lag=summarize_by_lag(whole),
        )

    def _updates(
        self, packed: Sequence[list[PackedBatch]]
    ) -> Iterator[tuple[Objective, _Part, list[torch.Tensor] | None]]:
        """Yields each update with its proximal logprobs, of the weights before the first of them."""
        objectives = [self._first_objective, *[self._objective] * (len(packed) - 1)]
        parts = self._parts(packed)
        if not any(objective.needs_proximal for objective in objectives):
            yield from zip(objectives, parts, repeat(None))
            return
        known = list(parts)
        proximal = [
            self._logprobs(part.batches) if objective.needs_proximal else None
            for objective, part in zip(objectives, known, strict=True)
        ]
        yield from zip(objectives, known, proximal, strict=True)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        optimizer = self._config.optimizer
        return learning_rate(
            step,
            self._config.learner.steps,
            peak=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule,
        )

    def _of_turns(self, groups: Sequence[Group], rewards_S: torch.Tensor, step: int) -> list[NDArray[np.float32]]:
        """Returns [R] values for the response of each trajectory where turns get credit of their own: advantages, or
        rewards for a critic. Empty where they do not."""
        algorithm = self._config.algorithm
        if not credits_turns(algorithm):
            return []
        if self._critic is None:
            return turn_advantages(groups, rewards_S, open_turn_advantage(algorithm), gamma=algorithm.credit.gamma)
        return [
            token_rewards(
                trajectory,
                reward,
                mask_and_lags(trajectory, step, self._config.max_lag)[0],
                gamma=self._critic.gamma,
            )
            for trajectory, reward in zip(trajectories_of(groups), rewards_S.tolist(), strict=True)
        ]

    def _rollouts(
        self, groups: Sequence[Group], advantages: Sequence[float | NDArray[np.float32]], step: int
    ) -> list[list[PackableSequence]]:
        return [
            from_trajectory(
                trajectory,
                advantages=advantage,
                step=step,
                max_lag=self._config.max_lag,
                routing=self._config.routing,
                has_teacher=needs_teacher(self._config.algorithm),
                has_candidates=self._config.algorithm.distillation.candidates > 0,
            )
            for trajectory, advantage in zip(trajectories_of(groups), advantages, strict=True)
        ]

    def _parts(self, packed: Sequence[list[PackedBatch]]) -> Iterator[_Part]:
        is_used = self._objective.needs_reference or (self._critic is not None and self._reward_kl is not None)
        references = (self._reference_logprobs(batches) if is_used else None for batches in packed)
        if self._critic is not None:
            yield from self._estimated(self._critic, packed, list(references))
            return
        for batches, reference in zip(packed, references, strict=True):
            yield _Part(batches=batches, reference=reference, returns=[], values=[], estimates={})

    def _estimated(
        self, critic: Critic, packed: Sequence[list[PackedBatch]], references: Sequence[list[torch.Tensor] | None]
    ) -> list[_Part]:
        """Adds the critic's advantages, which are whitened over all updates of the step together."""
        batches = [batch for part in packed for batch in part]
        values = critic.values(batches)
        has_own = credits_turns(self._config.algorithm)
        rewards = [batch.advantages_T if has_own else outcome_rewards(batch) for batch in batches]
        if self._reward_kl is not None:
            flat = [logprobs_T for reference in references for logprobs_T in reference or ()]
            rewards = [
                rewards_T - self._kl.coefficient * self._kl_of_tokens(batch, reference_T)
                for rewards_T, batch, reference_T in zip(rewards, batches, flat, strict=True)
            ]
        estimates = critic.returns_and_advantages(batches, rewards, values)
        estimated = [
            dataclasses.replace(batch, advantages_T=advantages_T)
            for batch, advantages_T in zip(batches, estimates.advantages, strict=True)
        ]
        parts, end = [], 0
        for part, reference in zip(packed, references, strict=True):
            where = slice(end, end := end + len(part))
            parts.append(
                _Part(
                    batches=estimated[where],
                    reference=reference,
                    returns=estimates.returns[where],
                    values=values[where],
                    estimates=estimates.metrics,
                )
            )
        return parts

    def _less_kl(self, rewards_S: torch.Tensor, rollouts: Sequence[Unit]) -> torch.Tensor:
        """[S] the rewards less the KL penalty of their rollouts, on every rank; each replica computes its
        rollouts'."""
        rows = self._rows(rollouts)
        shaped_S = torch.zeros_like(rewards_S)
        found = self._reference_logprobs([row.batch for row in rows]) or ()
        for row, reference_T in zip(rows, found, strict=True):
            indices = list(row.units)
            shaped_S[indices] = kl_shaped(
                rewards_S[indices],
                self._kl_of_tokens(row.batch, reference_T),
                row.batch.loss_mask_T,
                row.batch.rollouts,
                coefficient=self._kl.coefficient,
            )
        return torch.tensor(self._ranks.sum(shaped_S.tolist()), dtype=rewards_S.dtype)

    def _kl_of_tokens(self, batch: PackedBatch, reference_T: torch.Tensor) -> torch.Tensor:
        """[T] the KL estimate of the sampling policy to the reference."""
        assert self._reward_kl is not None
        return self._reward_kl(batch.behavior_logprobs_T, reference_T.to(batch.loss_mask_T.device), batch.loss_mask_T)

    def _computed_tokens(self, parts: Sequence[_Part]) -> int:
        """Returns the tokens of all replicas' micro-batches. Collective."""
        return int(self._ranks.sum([sum(batch.num_positions for part in parts for batch in part.batches)])[0])

    def _packed(self, units: Sequence[Unit]) -> list[PackedBatch]:
        return [row.batch for row in self._rows(units)]

    def _rows(self, units: Sequence[Unit]) -> list[Row]:
        rows = pack_units(
            units,
            replica=self._ranks.replica,
            replicas=self._ranks.replicas,
            micro_batch_tokens=self._config.learner.micro_batch_tokens,
            cost=self._config.cost,
            prefix_sharing=self._prefix_sharing,
        )
        wanted = partial(
            dataclasses.replace,
            only_trained=self._objective.ignores_context,
            wants_confidence=self._objective.needs_entropy,
        )
        return [dataclasses.replace(row, batch=wanted(row.batch)) for row in rows]

    def _logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Returns logprobs under the present weights."""
        return self._backend.logprobs([batch.plain for batch in batches], self._config.temperature)

    def _reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor] | None:
        """Returns the reference's logprobs under its own choice of experts, as no engine sampled from it."""
        if self._reference is None:
            return None
        own = [dataclasses.replace(batch.plain, experts_TLK=None) for batch in batches]
        return self._reference.logprobs(own, self._config.temperature)


def _has_loss(rows: Sequence[PackableSequence]) -> bool:
    """True where a token of the rollout is trained."""
    return any(bool(row.loss_mask.any()) for row in rows)


def prefix_sharing_of(learner: LearnerConfig) -> PrefixSharing:
    """Returns the setting; where it is auto, never for a backend that would hold each sample by itself."""
    is_chosen = learner.prefix_sharing != "auto" or abilities_of(learner.backend).computes_trees
    return learner.prefix_sharing if is_chosen else "never"


def _means(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(report[name] for report in reports) / len(reports) for name in (reports[0] if reports else ())}


def split(units: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Splits into nearly equal runs in order, none empty unless there are no units; groups stay together as far as the
    numbers allow."""
    parts = max(1, min(parts, len(units)))
    bounds = [len(units) * part // parts for part in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]


class Prefetcher(Sequence[T], Generic[T]):
    """The first value is made by the caller at once. A value that cannot be made raises where it is asked for."""

    def __init__(self, makers: Iterable[Callable[[], T]]) -> None:
        first, *others = makers
        self._first = first()
        self._others: list[Future[T]] = []
        if others:
            thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
            self._others = [thread.submit(maker) for maker in others]
            thread.shutdown(wait=False)  # it ends after the last of them

    def __len__(self) -> int:
        return 1 + len(self._others)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return self._others[number - 1].result() if number else self._first

    def __iter__(self) -> Iterator[T]:
        return (self[number] for number in range(len(self)))

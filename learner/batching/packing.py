"""Sequences laid end to end into micro-batches under a token budget, balanced over replicas, without padding.

Every rank computes the same plan from the same sequences; nothing is sent. The loss does not depend on the plan, which
only decides which sequences are computed together.
"""

import bisect
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, Trajectory
from headway.broker.staleness import is_too_stale, lag_of
from headway.broker.wire.rows import AgentRow, is_of_agent, rows_of
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.batching.tree import Labels, build_tree, labels_of

from .router_replay import Routing, RoutingError

Plan = list[list[list[int]]]
"""[replica][micro-batch] -> indices of its sequences, ascending."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The C tokens that a teacher found likeliest in the place of each of R response tokens, the likeliest first."""

    token_ids: NDArray[np.int32]
    """[R, C]"""
    logprobs: NDArray[np.float32]
    """[R, C] the teacher's; -inf fills a place without a token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackableSequence:
    """One prompt with its response, or one row of an agent's rollout. L tokens, the last R of them the response; of a
    row, those from the first one that it trains."""

    token_ids: NDArray[np.int32]
    """[L]"""
    prompt_length: int
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the token is trained."""
    behavior_logprobs: NDArray[np.float32]
    """[R]"""
    lags: NDArray[np.int64]
    """[R]"""
    advantages: NDArray[np.float32]
    """[R]"""
    experts: Experts | None = None
    """[L - 1, layers, experts per token] experts to replay, of all tokens but the last; None: routers choose."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R] as in a trajectory."""
    candidates: Candidates | None = None
    """A teacher's candidates for the response; None: there is no teacher."""
    is_further_row: bool = False
    """Whether it is a row of the same rollout as the sequence before it."""


def rollouts_of(sequences: Sequence[PackableSequence]) -> list[list[PackableSequence]]:
    """Returns the sequences of each rollout, in order; a row without those before it counts as a rollout."""
    rollouts: list[list[PackableSequence]] = []
    for sequence in sequences:
        if sequence.is_further_row and rollouts:
            rollouts[-1].append(sequence)
        else:
            rollouts.append([sequence])
    return rollouts


def from_trajectory(
    trajectory: Trajectory,
    *,
    advantages: float | NDArray[np.float32],
    step: int,
    max_lag: int,
    routing: Routing | None = None,
    has_teacher: bool = False,
    has_candidates: bool = False,
) -> list[PackableSequence]:
    """Returns the sequences that step `step` trains of a trajectory: one, or, of an agent's, one for each row.
    `advantages` is one for all tokens, or [R].

    `routing` describes a model whose routers replay the engine's choices. Raises RoutingError if the trajectory lacks
    them. With `has_teacher` a teacher's logprobs are trained on, with `has_candidates` its candidates, too. Raises
    HeadwayError if the trajectory lacks those, or if its rows are not what the teacher read.

    Tokens over the staleness bound are context only. With `staleness.on_over_bound` requeue or drop the broker gives
    out no such tokens, unless the bound was lowered since.
    """
    loss_mask, lags = mask_and_lags(trajectory, step, max_lag)
    rows = _agent_rows(trajectory)
    if rows:
        _check_rows(trajectory, has_routing=routing is not None, has_teacher=has_teacher or has_candidates)
    whole = PackableSequence(
        token_ids=np.concatenate([trajectory.prompt_tokens, trajectory.response_tokens]).astype(np.int32),
        prompt_length=len(trajectory.prompt_tokens),
        loss_mask=loss_mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        lags=lags,
        advantages=np.full(lags.shape, advantages, np.float32),
        experts=routing.experts_of(trajectory) if routing else None,
        teacher_logprobs=trajectory.teacher_logprobs,
        candidates=_candidates(trajectory) if has_candidates else None,
    )
    return [_row(whole, row, is_further=number > 0) for number, row in enumerate(rows)] or [whole]


def mask_and_lags(trajectory: Trajectory, step: int, max_lag: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns [R] which response tokens step `step` trains, and [R] their lags."""
    lags = np.zeros(len(trajectory.response_tokens), np.int64)
    loss_mask = trajectory.loss_mask.copy()
    for span in trajectory.spans:
        lags[span.start : span.end] = lag_of(span.version, step)
        if is_too_stale(span.version, step, max_lag):
            loss_mask[span.start : span.end] = 0
    return loss_mask, lags


def _agent_rows(trajectory: Trajectory) -> list[AgentRow]:
    """Returns the rows of an agent's episode; none where prompt and response, one after the other, are the only row."""
    if not is_of_agent(trajectory.turns):
        return []
    rows, length = rows_of(trajectory), len(trajectory.prompt_tokens) + len(trajectory.response_tokens)
    return [] if len(rows) == 1 and len(rows[0].token_ids) == length else rows


def _row(whole: PackableSequence, row: AgentRow, *, is_further: bool) -> PackableSequence:
    """Returns a row of the episode whose prompt and response are `whole`."""
    return PackableSequence(
        token_ids=row.token_ids,
        prompt_length=row.context_length,
        loss_mask=whole.loss_mask[row.positions],
        behavior_logprobs=whole.behavior_logprobs[row.positions],
        lags=whole.lags[row.positions],
        advantages=whole.advantages[row.positions],
        is_further_row=is_further,
    )


def _check_rows(trajectory: Trajectory, *, has_routing: bool, has_teacher: bool) -> None:
    """Raises HeadwayError where a setting needs values of tokens in the order in which they lie in the response, which
    is not the order in which the model read them."""
    what = "an agent's episode with branches, or with a prompt or calls of the agent's own that no row has"
    if has_routing:
        raise RoutingError(
            f"{trajectory.tid} is {what}, and algorithm.router_replay=true knows the experts of one row alone; set it"
            " to false."
        )
    if has_teacher:
        raise HeadwayError(
            f"{trajectory.tid} is {what}, and a teacher (algorithm.distillation.coefficient above 0) reads a response"
            " as one row: its logprobs are those of other texts. Set the coefficient to 0."
        )


def _candidates(trajectory: Trajectory) -> Candidates:
    if trajectory.candidate_tokens is None or trajectory.candidate_logprobs is None:
        raise HeadwayError(
            f"{trajectory.tid} has no candidates of a teacher, as a run without them samples it; it cannot be trained"
            " with algorithm.distillation.top_k above 0."
        )
    return Candidates(trajectory.candidate_tokens, trajectory.candidate_logprobs)


def labelled(token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> PackableSequence:
    """Returns a sequence that no policy sampled. `loss_mask` [L] is 1 where the token is trained; all before the first
    such token is its prompt."""
    prompt_length = int(loss_mask.argmax())
    response = len(token_ids) - prompt_length
    zeros = np.zeros(response, np.float32)
    return PackableSequence(
        token_ids=token_ids,
        prompt_length=prompt_length,
        loss_mask=loss_mask[prompt_length:],
        behavior_logprobs=zeros,
        lags=np.zeros(response, np.int64),
        advantages=zeros,
    )


def plan(
    lengths: Sequence[int],
    replicas: int,
    micro_batch_tokens: int,
    cost: CostModel = DEFAULT_COST,
    costs: Sequence[float] | None = None,
) -> Plan:
    """Plans every sequence exactly once. Every replica gets the same number of micro-batches, at least one, some empty.

    A micro-batch holds at most `micro_batch_tokens`, or a single longer sequence; none is ever cut. There are no more
    micro-batches than best-fit decreasing needs. The k-th ones of all replicas cost about the same, since replicas wait
    for each other after each; whole replicas cost about the same, too. O(n log n). `costs` has the cost of each where
    that does not follow from its length.
    """
    longest_first = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    sorted_lengths = np.asarray(lengths, np.int64)[longest_first]
    sorted_costs = cost.of_sequences(sorted_lengths) if costs is None else np.asarray(costs, np.float64)[longest_first]
    bins = _few_bins(sorted_lengths, sorted_costs, replicas, micro_batch_tokens)
    shares: Plan = [[] for _ in range(replicas)]
    for replica, chosen in _in_rows(bins, sorted_costs.tolist(), replicas):
        shares[replica].append(sorted(longest_first[chosen].tolist()))
    return shares


# From here on sequences are numbered longest first. A bin is the list of sequences of a later micro-batch.
Bins = list[list[int]]
_Lengths = NDArray[np.int64]
_Costs = NDArray[np.float64]


def _few_bins(lengths: _Lengths, costs: _Costs, replicas: int, budget: int) -> Bins:
    """Returns as few micro-batches for each replica as are needed, of even cost where there is room."""
    fewest = max(1, math.ceil(_lower_bound(lengths, budget) / replicas))
    if even := _spread(lengths, costs, fewest, replicas, budget):
        return even
    tight = _best_fit(lengths, budget)
    count = math.ceil(len(tight) / replicas)
    even = _spread(lengths, costs, count, replicas, budget) if count > fewest else None
    return even or tight + [[] for _ in range(count * replicas - len(tight))]


def _lower_bound(lengths: _Lengths, budget: int) -> int:
    """Returns the fewest bins of any plan: one for every sequence over half the budget, and room for all tokens."""
    within = lengths[lengths <= budget]
    by_tokens = math.ceil(int(within.sum()) / budget)
    return len(lengths) - len(within) + max(by_tokens, int((2 * within > budget).sum()))


def _spread(lengths: _Lengths, costs: _Costs, count: int, replicas: int, budget: int) -> Bins | None:
    """Puts each sequence, costliest first, into the bin that lacks most of its row's height; None if there is no room.

    `roomy` has the bins with room for the sequence at hand. The others wait by their room and come back once sequences
    are short enough: lengths only fall, so a bin moves at most twice for each sequence put into it.
    """
    bins: Bins = [[] for _ in range(count * replicas)]
    if len(bins) == 1 and int(lengths.sum()) <= budget:  # as most steps of a small model are
        return [list(range(len(lengths)))]
    rooms = [budget] * len(bins)
    heights = np.repeat(_heights(lengths, costs, count, replicas, budget), replicas)
    roomy = list(zip((-heights).tolist(), range(len(bins)), strict=True))
    waiting: dict[int, list[tuple[float, int]]] = defaultdict(list)
    previous = budget + 1
    for sequence, (length, cost) in enumerate(zip(lengths.tolist(), costs.tolist(), strict=True)):
        for room in range(length, previous):
            for returning in waiting.pop(room, ()):
                heapq.heappush(roomy, returning)
        previous = length
        if not roomy:
            return None
        excess, place = roomy[0]
        bins[place].append(sequence)
        rooms[place] -= length
        if rooms[place] >= length:
            heapq.heapreplace(roomy, (excess + cost, place))
        else:
            waiting[rooms[place]].append((excess + cost, heapq.heappop(roomy)[1]))
    return bins


def _heights(lengths: _Lengths, costs: _Costs, count: int, replicas: int, budget: int) -> NDArray[np.float64]:
    """[count] the height of each row: the cost that its bins, the k-th of every replica, should have; it falls with k.

    A row is as high as the costliest sequence that it must hold; rows without such a sequence share the rest evenly.
    The rest depends on how many tokens the budget leaves beside the costliest sequences. `cumsum` adds in order, so
    every machine rounds alike: ranks with different plans would wait for each other for ever.
    """
    seeds = np.zeros(count * replicas)
    seeds[: len(costs)] = costs[: len(seeds)]
    tops, means = seeds[::replicas], np.diff(np.cumsum(seeds)[replicas - 1 :: replicas], prepend=0.0) / replicas
    total, tokens = float(np.cumsum(costs)[-1:].sum()), max(1, int(lengths.sum()))
    filled = np.maximum(np.minimum(tops, budget * total / tokens), means)
    above = np.concatenate([[0.0], np.cumsum(filled)[:-1]])
    levels = (total / replicas - above) / np.arange(count, 0, -1)
    is_even = tops <= levels
    if not is_even.any():
        return tops
    first = int(is_even.argmax())
    return np.concatenate([tops[:first], np.full(count - first, levels[first])])


def _best_fit(lengths: _Lengths, budget: int) -> Bins:
    """Returns few bins: each sequence, longest first, goes into the fullest one with room for it."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []
    shortest = int(lengths[-1])
    for sequence, length in enumerate(lengths.tolist()):
        found = bisect.bisect_left(rooms, (length, 0))
        if found == len(rooms):
            rooms.append((budget, len(bins)))
            bins.append([])
        room, place = rooms.pop(found)
        bins[place].append(sequence)
        if room - length >= shortest:
            bisect.insort(rooms, (room - length, place))
    return bins


def _in_rows(bins: Bins, costs: Sequence[float], replicas: int) -> Iterator[tuple[int, list[int]]]:
    """Yields (replica, bin), row by row. A row has the costliest bins that are left, so that they differ little.

    Within a row the replica with the lowest cost so far takes the costliest bin.
    """
    totals = [sum([costs[sequence] for sequence in chosen]) for chosen in bins]
    order = sorted(range(len(bins)), key=lambda place: (-totals[place], place))
    loads = [0.0] * replicas
    for start in range(0, len(order), replicas):
        least_first = sorted(range(replicas), key=loads.__getitem__)
        for place, replica in zip(order[start : start + replicas], least_first, strict=True):
            loads[replica] += totals[place]
            yield replica, bins[place]


def pack(
    sequences: Sequence[PackableSequence],
    replica: int,
    replicas: int,
    micro_batch_tokens: int,
    cost: CostModel = DEFAULT_COST,
) -> list[PackedBatch]:
    """Returns this replica's micro-batches. All ranks call it with the same sequences in the same order."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    micro_batches = plan(lengths, replicas, micro_batch_tokens, cost)[replica]
    return [concatenate([sequences[index] for index in chosen]) for chosen in micro_batches]


def concatenate(sequences: Sequence[PackableSequence], *, is_tree: bool = False) -> PackedBatch:
    """Returns one micro-batch of these sequences, in this order. With `is_tree` tokens that they share at their
    beginnings are computed once."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    masks = [_after_prompt(s, s.loss_mask, np.float32) for s in sequences]
    logprobs = [_after_prompt(s, s.behavior_logprobs * (s.loss_mask != 0), np.float32) for s in sequences]
    advantages = [_after_prompt(s, s.advantages * (s.loss_mask != 0), np.float32) for s in sequences]
    lags = [_after_prompt(s, s.lags * (s.loss_mask != 0), np.int64) for s in sequences]
    return PackedBatch(
        token_ids_T=_joined([s.token_ids for s in sequences], np.int64),
        position_ids_T=_joined([np.arange(length) for length in lengths], np.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        cu_rollouts=_rollout_bounds(sequences),
        loss_mask_T=_joined(masks, np.float32),
        behavior_logprobs_T=_joined(logprobs, np.float32),
        advantages_T=_joined(advantages, np.float32),
        lags_T=_joined(lags, np.int64),
        experts_TLK=_joined_experts(sequences),
        teacher_logprobs_T=_joined_teacher(sequences),
        candidates_TC=_joined_candidates(sequences, lambda candidates: candidates.token_ids.astype(np.int64)),
        teacher_logprobs_TC=_joined_candidates(sequences, lambda candidates: candidates.logprobs),
        tree=build_tree([labels(sequence) for sequence in sequences]) if is_tree else None,
    )


def _rollout_bounds(sequences: Sequence[PackableSequence]) -> torch.Tensor | None:
    """[U + 1] where each rollout begins; None where each has one sequence."""
    if not any(sequence.is_further_row for sequence in sequences):
        return None
    lengths = [sum(len(sequence.token_ids) for sequence in rows) for rows in rollouts_of(sequences)]
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def labels(sequence: PackableSequence) -> Labels:
    """Returns what must agree where the sequence shares tokens with others: experts to replay and candidates, too."""
    candidates = sequence.candidates
    if candidates is None:
        return labels_of(sequence.token_ids, sequence.experts)
    names_LC = np.pad(candidates.token_ids, ((sequence.prompt_length, 0), (0, 0)))
    return labels_of(sequence.token_ids, sequence.experts, names_LC[1:])


def _joined_experts(sequences: Sequence[PackableSequence]) -> torch.Tensor | None:
    """[T, layers, experts per token] if sequences have them; -1 for the last token of each."""
    recorded = [sequence.experts for sequence in sequences if sequence.experts is not None]
    assert len(recorded) in (0, len(sequences)), "a step replays all of its sequences or none"
    if not recorded:
        return None
    rows = [np.pad(experts.astype(np.int16), ((0, 1), (0, 0), (0, 0)), constant_values=-1) for experts in recorded]
    return torch.from_numpy(np.concatenate(rows))


def _joined_teacher(sequences: Sequence[PackableSequence]) -> torch.Tensor | None:
    """[T] if all sequences have a teacher's logprobs."""
    parts = [
        _after_prompt(s, s.teacher_logprobs * (s.loss_mask != 0), np.float32)
        for s in sequences
        if s.teacher_logprobs is not None
    ]
    return _joined(parts, np.float32) if len(parts) == len(sequences) else None


def _joined_candidates(
    sequences: Sequence[PackableSequence], values_of: Callable[[Candidates], NDArray[np.generic]]
) -> torch.Tensor | None:
    """[T, C] if sequences have candidates; 0 over prompts."""
    parts = [
        np.pad(values_of(sequence.candidates), ((sequence.prompt_length, 0), (0, 0)))
        for sequence in sequences
        if sequence.candidates is not None
    ]
    assert len(parts) in (0, len(sequences)), "a step has candidates for all of its sequences or for none"
    return torch.from_numpy(np.concatenate(parts)) if parts else None


def _after_prompt(sequence: PackableSequence, values_R: NDArray[np.generic], dtype: type) -> NDArray[np.generic]:
    """[L] response values at their place in the sequence, 0 over the prompt."""
    values_L: NDArray[np.generic] = np.zeros(len(sequence.token_ids), dtype)
    values_L[sequence.prompt_length :] = values_R
    return values_L


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype))

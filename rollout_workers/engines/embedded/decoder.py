"""Continuous batching, one forward at a time and without threads; `EmbeddedEngine` drives it from its own thread.

The forward takes all tokens of a sample whose keys are not cached (a new sample, or one cached under older weights) and
one token of every other sample, and gives each its next token. So a weight swap only forgets what was cached, or not
even that. No sample uses another sample's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from broker.schema import Experts, WeightVersion
from rollout_workers.engines.base import GenerationRequest

from .router_tap import RouterTap
from .sampling import Sampler
from .slot_cache import Decode, Prefill, SlotCache, SlotLayout

PREFILL_TOKENS = 4096
"""Most new tokens in one forward; a longer sequence goes alone."""


@dataclass(eq=False)
class Sample:
    """One running request. `tokens` are its prompt and the tokens that it has generated."""

    request: GenerationRequest
    limit: int
    """Number of tokens at which the sample ends, whatever the model says."""
    tokens: list[int]
    generator: torch.Generator | None = None
    cached: int = 0
    """Number of `tokens` with keys in the cache: all but the newest, or none."""
    reported: int = 0
    """Number of `tokens` whose experts were reported already: tokens that are computed anew are not reported again."""


@dataclass(frozen=True)
class Sampled:
    """The next token of one sample."""

    sample: Sample
    token: int
    logprob: float
    finish_reason: Literal["stop", "length"] | None
    experts: Experts | None
    """The experts of the sample's tokens that were fed for the first time; None if the request does not want them."""


@dataclass
class Decoder:
    """A model, a cache of slots, and the running samples; sample i holds slot i."""

    model: nn.Module
    capacity: int
    max_len: int
    sampler: Sampler
    device: torch.device
    version: WeightVersion | None = None
    running: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cache = SlotCache(self.capacity, self.max_len)
        self.router_tap = RouterTap(self.model)
        self._asleep: dict[str, torch.Size] = {}
        """Shapes of the parameters whose memory was freed, by name."""

    def add(self, sample: Sample) -> None:
        """Give the sample the next slot."""
        assert len(self.running) < self.capacity
        sample.generator = self.sampler.own_generator(sample.request)
        if sample.request.experts_from is not None:
            self.router_tap.listen()
        self.running.append(sample)

    @torch.inference_mode()
    def drop(self, sample: Sample) -> None:
        """Free the sample's slot. The last sample moves there, so that used slots stay a prefix of the cache."""
        slot = self.running.index(sample)
        last = self.running.pop()
        if last is not sample:
            self._cache.move(len(self.running), slot, last.cached)
            self.running[slot] = last

    def changed(self, version: WeightVersion, *, keep_cache: bool = False) -> None:
        """Note that the model's weights are now those of `version`. Running samples are computed anew, unless
        `keep_cache`."""
        self.version = version
        if not keep_cache:
            for sample in self.running:
                sample.cached = 0

    def sleep(self) -> None:
        """Free weights and cache; buffers stay. No sample may be running."""
        assert not self.running
        self.version = None
        self._cache = SlotCache(self.capacity, self.max_len)
        for name, parameter in self.model.named_parameters():
            self._asleep.setdefault(name, parameter.shape)
            parameter.data = parameter.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate memory for weights that are still to come."""
        for name, shape in self._asleep.items():
            parameter = self.model.get_parameter(name)
            parameter.data = parameter.data.new_empty(shape)
        self._asleep = {}

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Run one forward and return the next token of every sample that took part. Finished samples leave."""
        fresh, ready = self._select()
        took_part = [self.running[slot] for slot in fresh + ready]
        logits_NV = self._forward(fresh, ready)
        experts = self._new_experts(took_part)
        tokens, logprobs = self.sampler.sample(
            logits_NV, [sample.request for sample in took_part], [sample.generator for sample in took_part]
        )
        results = [append(*next_) for next_ in zip(took_part, tokens, logprobs, experts, strict=True)]
        for result in results:
            if result.finish_reason:
                self.drop(result.sample)
        return results

    def _new_experts(self, took_part: Sequence[Sample]) -> list[Experts | None]:
        """Return the experts of each sample's tokens that the last forward fed for the first time."""
        if all(sample.request.experts_from is None for sample in took_part):
            return [None] * len(took_part)
        fed = [len(sample.tokens) - sample.cached for sample in took_part]
        rows = np.split(self.router_tap.last(), np.cumsum(fed)[:-1])
        return [first_fed(sample, own) for sample, own in zip(took_part, rows, strict=True)]

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprobs of `token_ids[1:]` at temperature 1. The cache is not touched."""
        tokens_T = torch.tensor(token_ids, device=self.device)
        position_T = torch.arange(len(token_ids), device=self.device)
        layout = SlotLayout(None, position_T, position_T, whole([len(token_ids)], position_T), None)
        logits_TV = self._call(tokens_T, layout, keep=position_T)[:-1]
        logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        scores: list[float] = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0].tolist()
        return scores

    def _select(self) -> tuple[list[int], list[int]]:
        """Return the slots to prefill now, within the budget, and the slots to decode."""
        fresh: list[int] = []
        ready: list[int] = []
        budget = PREFILL_TOKENS
        for slot, sample in enumerate(self.running):
            if sample.cached:
                ready.append(slot)
            elif not fresh or len(sample.tokens) <= budget:
                fresh.append(slot)
                budget -= len(sample.tokens)
        return fresh, ready

    def _forward(self, fresh: list[int], ready: list[int]) -> torch.Tensor:
        """Return [N, V] logits after the last token of each slot, `fresh` ones first."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        lengths = [len(self.running[slot].tokens) for slot in fresh]
        for slot, length in zip(fresh, lengths, strict=True):
            tokens += self.running[slot].tokens
            slots += [slot] * length
            positions += range(length)
        new = len(tokens)
        tokens += [self.running[slot].tokens[-1] for slot in ready]
        slots += ready
        positions += [self.running[slot].cached for slot in ready]
        self._cache.reserve(max(positions) + 1)
        tokens_T, slot_T, position_T = torch.tensor([tokens, slots, positions], device=self.device)
        layout = SlotLayout(
            self._cache,
            slot_T,
            position_T,
            whole(lengths, position_T[:new]) if fresh else None,
            one_each(ready, position_T[new:]) if ready else None,
        )
        ends = torch.tensor(lengths, dtype=torch.long, device=self.device).cumsum(0) - 1
        return self._call(tokens_T, layout, keep=torch.cat((ends, torch.arange(new, len(tokens)).to(ends))))

    def _call(self, tokens_T: torch.Tensor, layout: SlotLayout, keep: torch.Tensor) -> torch.Tensor:
        """Call the model's own forward; it returns logits of the positions in `keep` only."""
        output = self.model(
            input_ids=tokens_T[None],
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            headway_layout=layout,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def whole(lengths: Sequence[int], position_T: torch.Tensor) -> Prefill:
    """Return the layout of packed sequences of these lengths."""
    counts = torch.tensor(lengths, device=position_T.device)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths), device=position_T.device), counts)
    return Prefill(len(position_T), sequence_T, position_T, len(lengths), max(lengths))


def one_each(slots: list[int], position_N: torch.Tensor) -> Decode:
    """Return the layout of the newest token of each of these slots, at these positions."""
    is_prefix = slots[-1] == len(slots) - 1
    reach = torch.arange(int(position_N.max()) + 1, device=position_N.device)
    return Decode(
        slice(len(slots)) if is_prefix else torch.tensor(slots, device=position_N.device),
        (reach <= position_N[:, None])[:, None, None],
    )


def first_fed(sample: Sample, experts: Experts) -> Experts | None:
    """Return the rows of the sample's last tokens that the request wants and that were not reported before."""
    if sample.request.experts_from is None:
        return None
    wanted = len(sample.tokens) - max(sample.reported, sample.request.experts_from)
    sample.reported = len(sample.tokens)
    return experts[len(experts) - wanted :]


def append(sample: Sample, token: int, logprob: float, experts: Experts | None) -> Sampled:
    """Append a sampled token to its sample. Everything before it is cached now."""
    sample.cached = len(sample.tokens)
    sample.tokens.append(token)
    is_full = len(sample.tokens) >= sample.limit
    if token in sample.request.stop_token_ids:
        return Sampled(sample, token, logprob, "stop", experts)
    return Sampled(sample, token, logprob, "length" if is_full else None, experts)

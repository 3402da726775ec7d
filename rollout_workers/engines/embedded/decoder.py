"""Continuous batching, one forward at a time and without threads; `EmbeddedEngine` drives it from its own thread.

The forward takes the newest token of every sample and, for a sample whose keys are not cached (a new sample, or one
cached under older weights), all tokens before it. So a weight swap only forgets what was cached, or not even that.
Samples that begin together with the same tokens, such as those of one group, have these computed once; no sample uses
what another one has cached. `Sampler` chooses the next tokens of all samples at once. N sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from headway.broker.schema import Experts, WeightVersion
from headway.rollout_workers.engines.base import EngineOptionsError, GenerationRequest

from .model_layers import RouterTap
from .slot_cache import Decode, Prefill, SlotCache, SlotLayout


class Sampler:
    """Samples with one generator for all requests; a request with a seed gets a generator of its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def own_generator(self, request: GenerationRequest) -> torch.Generator | None:
        """Return the generator of a seeded request, so that its tokens do not depend on the requests beside it."""
        return None if request.seed is None else torch.Generator(self._device).manual_seed(request.seed)

    def sample(
        self,
        logits_NV: torch.Tensor,
        requests: Sequence[GenerationRequest],
        generators: Sequence[torch.Generator | None],
    ) -> tuple[list[int], list[float]]:
        """Return tokens and their logprobs (fp32, temperature applied, before the cuts of top-k and top-p)."""
        temperatures = [request.temperature or 1.0 for request in requests]
        temperature_N = torch.tensor(temperatures, device=self._device)
        logprobs_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
        weights_NV = cut(logprobs_NV, requests).exp()
        if any(request.temperature > 0 for request in requests):
            weights_NV = weights_NV / self._noise(weights_NV, requests, generators)
        tokens_N = weights_NV.argmax(dim=-1)
        sampled_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        return tokens_N.tolist(), sampled_N.tolist()

    def _noise(
        self,
        weights_NV: torch.Tensor,
        requests: Sequence[GenerationRequest],
        generators: Sequence[torch.Generator | None],
    ) -> torch.Tensor:
        """Return [N, V] noise from Exp(1): argmax(p / noise) is a sample of p. A greedy request has ones."""
        noise_NV = torch.empty_like(weights_NV).exponential_(generator=self._generator)
        for row, (request, generator) in enumerate(zip(requests, generators, strict=True)):
            if request.temperature == 0:
                noise_NV[row] = 1.0
            elif generator is not None:
                noise_NV[row].exponential_(generator=generator)
        return noise_NV


def cut(logprobs_NV: torch.Tensor, requests: Sequence[GenerationRequest]) -> torch.Tensor:
    """Set logprobs to -inf outside each request's top-k and nucleus. The likeliest token always stays."""
    rows = [row for row, request in enumerate(requests) if request.top_k > 0 or request.top_p < 1]
    if not rows:
        return logprobs_NV
    vocabulary = logprobs_NV.shape[1]
    kept = [requests[row].top_k or vocabulary for row in rows]
    top_k = torch.tensor(kept, device=logprobs_NV.device)[:, None]
    top_p = torch.tensor([requests[row].top_p for row in rows], device=logprobs_NV.device)[:, None]
    ordered, order = logprobs_NV[rows].sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=ordered.device) >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= top_p
    beyond[:, 0] = False
    result = logprobs_NV.clone()
    result[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(beyond, -torch.inf))
    return result


Beginnings = dict[tuple[int, ...], list[int]]
"""Tokens to compute before the newest ones: each different sequence, with the slots that begin with it."""

PREFILL_TOKENS = 4096
"""Most tokens before the newest ones in one forward; a longer sequence goes alone."""


@dataclass(eq=False)
class Sample:
    """One running request. `tokens` are its prompt and the tokens that it has generated."""

    request: GenerationRequest
    limit: int
    """Number of tokens at which the sample ends, whatever the model says."""
    tokens: list[int]
    generator: torch.Generator | None = None
    logprobs: list[float] = field(default_factory=list)
    """One for each generated token."""
    experts: list[Experts] = field(default_factory=list)
    """The experts of tokens that were fed for the first time, if the request wants them; a reader takes them away."""
    finish_reason: Literal["stop", "length"] | None = None
    is_cached: bool = False
    """Whether all `tokens` but the newest have keys in the cache; otherwise none has."""
    reported: int = 0
    """Number of `tokens` whose experts were noted: tokens that are computed anew are not noted again."""

    @property
    def response(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.tokens) - len(self.logprobs) :]

    def add(self, token: int, logprob: float) -> bool:
        """Append a sampled token. Everything before it is cached now. Returns whether the sample ends with it."""
        self.is_cached = True
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None


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
        self._attention = [part for part in self.model.modules() if hasattr(part, "layer_idx")]
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
        """Free the sample's slot."""
        self._free([self.running.index(sample)])

    def changed(self, version: WeightVersion, *, keep_cache: bool = False) -> None:
        """Note that the model's weights are now those of `version`. Running samples are computed anew, unless
        `keep_cache`."""
        self.version = version
        if not keep_cache:
            for sample in self.running:
                sample.is_cached = False

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
    def step(self) -> list[Sample]:
        """Run one forward, which gives every sample that takes part its next token. Returns the samples that have
        ended; they leave."""
        slots, before = self._select()
        took_part = [self.running[slot] for slot in slots]
        logits_NV = self._forward(slots, before)
        self._note_experts(slots, before)
        tokens, logprobs = self.sampler.sample(
            logits_NV, [sample.request for sample in took_part], [sample.generator for sample in took_part]
        )
        ended = [
            slot
            for slot, sample, token, logprob in zip(slots, took_part, tokens, logprobs, strict=True)
            if sample.add(token, logprob)
        ]
        finished = [self.running[slot] for slot in ended]
        self._free(ended)
        return finished

    def check_attention(self) -> None:
        """Raise EngineOptionsError unless every layer attends by `slot_attention`, as two tokens show: another layer
        would mix sequences, and keep what it remembers of them where no swap finds it."""
        asked: set[nn.Module] = set()
        self.score([0, 1], asked)
        layers: int = self.model.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
        if len(asked) < layers:
            raise EngineOptionsError(
                f"the embedded engine does not support {self.model.config.model_type}: {layers - len(asked)} of its"  # type: ignore[union-attr]
                f" {layers} layers do not attend by transformers' attention interface. Set engine.kind=vllm."
            )

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], asked: set[nn.Module] | None = None) -> list[float]:
        """Return the logprobs of `token_ids[1:]` at temperature 1. The cache is not touched. `asked` gets the modules
        that attend."""
        tokens_T = torch.tensor(token_ids, device=self.device)
        position_T = torch.arange(len(token_ids), device=self.device)
        layout = SlotLayout(
            None, position_T, position_T, None, prefill_layout([len(token_ids)], position_T), None, asked
        )
        logits_TV = self._call(tokens_T, position_T, layout, keep=len(token_ids))[:-1]
        logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        scores: list[float] = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0].tolist()
        return scores

    def _select(self) -> tuple[list[int], Beginnings]:
        """Return the slots that take part now, and what is computed before their newest tokens, within the budget."""
        slots: list[int] = []
        before: dict[tuple[int, ...], list[int]] = {}
        budget = PREFILL_TOKENS
        for slot, sample in enumerate(self.running):
            if not sample.is_cached and len(sample.tokens) > 1:
                new = tuple(sample.tokens[:-1])
                if new not in before:
                    if before and len(new) > budget:
                        continue
                    budget -= len(new)
                before.setdefault(new, []).append(slot)
            slots.append(slot)
        return slots, before

    def _forward(self, slots: list[int], before: Beginnings) -> torch.Tensor:
        """Return [N, V] logits after the newest token of each slot; the tokens before it come first in the row."""
        newest = [self.running[slot].tokens[-1] for slot in slots]
        ends = [len(self.running[slot].tokens) - 1 for slot in slots]
        self._cache.reserve(max(ends) + 1)
        lengths = [len(new) for new in before]
        new = sum(lengths)
        tokens_T, position_T = self._tensors(
            [*(token for tokens in before for token in tokens), *newest],
            [*(position for length in lengths for position in range(length)), *ends],
        )
        places, slot_P, position_P = self._places(slots, before, ends)
        layout = SlotLayout(
            self._cache,
            slot_P,
            position_P,
            places,
            prefill_layout(lengths, position_T[:new]) if before else None,
            decode_layout(slots, position_T[new:], max(ends) + 1),
        )
        return self._call(tokens_T, position_T, layout, keep=len(slots))

    def _places(
        self, slots: list[int], before: Beginnings, ends: list[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return for each place in the cache that is filled the packed token that it gets (None: the packed tokens in
        their order), its slot and its position."""
        sources, filled, positions, first = list[int](), list[int](), list[int](), 0
        for new, sharing in before.items():
            for slot in sharing:
                sources += range(first, first + len(new))
                filled += [slot] * len(new)
                positions += range(len(new))
            first += len(new)
        sources += range(first, first + len(slots))
        source_P, slot_P, position_P = self._tensors(sources, filled + slots, positions + ends)
        return None if len(sources) == first + len(slots) else source_P, slot_P, position_P

    def _tensors(self, *rows: list[int]) -> tuple[torch.Tensor, ...]:
        """Return the rows of equal lengths as tensors. From lists of lists PyTorch takes several times as long."""
        return torch.from_numpy(np.array(rows, np.int64)).to(self.device).unbind()

    def _free(self, slots: Sequence[int]) -> None:
        """Free these slots. The last samples move there, so that used slots stay a prefix of the cache."""
        left = len(self.running) - len(slots)
        holes = [slot for slot in slots if slot < left]
        moving = [slot for slot in range(left, len(self.running)) if slot not in slots]
        for hole, slot in zip(holes, moving, strict=True):
            self.running[hole] = self.running[slot]
        del self.running[left:]
        if holes:
            self._cache.move(moving, holes)

    def _note_experts(self, slots: list[int], before: Beginnings) -> None:
        """Note the experts of each sample's tokens that the last forward fed for the first time."""
        if all(self.running[slot].request.experts_from is None for slot in slots):
            return
        rows, first = self.router_tap.last(), 0
        fed = {slot: [row] for slot, row in zip(slots, rows[len(rows) - len(slots) :, None], strict=True)}
        for new, sharing in before.items():
            for slot in sharing:
                fed[slot].insert(0, rows[first : first + len(new)])
            first += len(new)
        for slot, parts in fed.items():
            note_first_fed(self.running[slot], np.concatenate(parts))

    def _call(self, tokens_T: torch.Tensor, position_T: torch.Tensor, layout: SlotLayout, keep: int) -> torch.Tensor:
        """Call the model's own forward; it returns logits of the last `keep` tokens only."""
        for part in self._attention:
            part.headway_layout = layout  # type: ignore[assignment]
        output = self.model(
            input_ids=tokens_T[None],
            position_ids=position_T[None],
            use_cache=False,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def prefill_layout(lengths: Sequence[int], position_T: torch.Tensor) -> Prefill:
    """Return the layout of packed sequences of these lengths."""
    counts = torch.tensor(lengths, device=position_T.device)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths), device=position_T.device), counts)
    return Prefill(len(position_T), sequence_T, position_T, len(lengths), max(lengths))


def decode_layout(slots: list[int], position_N: torch.Tensor, length: int) -> Decode:
    """Return the layout of the newest token of each of these slots, at these positions below `length`."""
    is_prefix = slots[-1] == len(slots) - 1
    reach = torch.arange(length, device=position_N.device)
    bias = torch.zeros(len(slots), length, device=position_N.device).masked_fill_(
        reach > position_N[:, None], -torch.inf
    )
    return Decode(
        slice(len(slots)) if is_prefix else torch.tensor(slots, device=position_N.device), bias[:, None, None]
    )


def note_first_fed(sample: Sample, experts: Experts) -> None:
    """Note the rows of the sample's last tokens that the request wants and that were not noted before."""
    if sample.request.experts_from is None:
        return
    wanted = len(sample.tokens) - max(sample.reported, sample.request.experts_from)
    sample.reported = len(sample.tokens)
    sample.experts.append(experts[len(experts) - wanted :])

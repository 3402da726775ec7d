"""Batches run through Megatron's pipeline schedules; the last stage sends the results to the others."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import nn

from headway.learner.backends.base import TokenLoss
from headway.learner.backends.moe import disagreement
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import LayoutConfig
from headway.learner.ranks import sum_over_ranks

from . import groups
from .row import MegatronRow, make_row, padded_length

Reports = list[dict[str, float]]


class Schedule:
    """Megatron's schedules for one model. All calls are collective; replicas pass the same number of micro-batches."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        rotary: nn.Module,
        layout: LayoutConfig,
        device: torch.device,
        vocabulary: int,
    ) -> None:
        self._models = list(models)
        self._rotary = rotary.to(device)
        self._device = device
        self._vocabulary = vocabulary
        self._dtype = next(models[0].parameters()).dtype
        self._width: int = get_model_config(models[0]).hidden_size
        self._multiple = layout.tensor * layout.context
        self._is_interleaved = layout.virtual_pipeline > 1
        self._num_stages = layout.pipeline
        self._tally_2 = torch.zeros(2, dtype=torch.int64, device=device)

    def train(self, batches: Sequence[PackedBatch], temperature: float, loss: TokenLoss) -> tuple[float, Reports]:
        """Sum gradients into their buffers and over replicas; return (loss over all replicas, this replica's
        reports)."""
        shares, reports = [torch.zeros((), dtype=torch.float64, device=self._device)], Reports()

        def finish(row: MegatronRow, logprobs_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            logprobs_T = logprobs_T.to(batches[0].token_ids_T.device)
            nothing = (logprobs_T * 0.0).sum()
            share, report = loss(row.number, logprobs_T) if row.num_tokens else (nothing, {})
            shares.append(share.detach().double().to(self._device, non_blocking=True))
            reports.append(report)
            return share if share.requires_grad else share + nothing, torch.zeros((), dtype=torch.int), None

        self._run(batches, temperature, finish)
        reports = self._from_last_stage(reports)[: len(batches)]
        if any(batch.experts_TLK is not None for batch in batches):
            reports[0] |= self._disagreement()
        return self._over_replicas(torch.stack(shares).sum()), reports

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[PackedBatch], temperature: float, wants_hidden: bool = False, top: int = 0
    ) -> list[torch.Tensor]:
        """[T] logprobs of every micro-batch ([T, 2 + K] with candidates), or [T, W] final hidden states, or [T, K, 2]
        the K = `top` likeliest tokens, on the batch's device and on all stages."""
        outputs: list[torch.Tensor] = []

        def finish(row: MegatronRow, output: torch.Tensor, non_loss_data: bool) -> None:
            outputs.append(output)

        self._run(batches, temperature, finish, is_training=False, wants_hidden=wants_hidden, top=top)
        width = self._width_of(batches, wants_hidden, top)
        outputs = self._shared(outputs[: len(batches)], batches, width, self._dtype if wants_hidden else torch.float32)
        return [output.to(batch.token_ids_T.device) for output, batch in zip(outputs, batches, strict=True)]

    def _run(
        self,
        batches: Sequence[PackedBatch],
        temperature: float,
        finish: Callable[..., Any],
        is_training: bool = True,
        wants_hidden: bool = False,
        top: int = 0,
    ) -> None:
        rows = self._rows(batches, temperature, wants_hidden, top)
        iterators = [iter(rows) for _ in self._models]
        get_forward_backward_func()(
            forward_step_func=functools.partial(_forward, finish),
            data_iterator=iterators if self._is_interleaved else iterators[0],
            model=self._models if self._is_interleaved else self._models[0],
            num_microbatches=len(rows),
            seq_length=len(rows[0].token_ids_P),  # looked at only where all rows have the same length
            micro_batch_size=1,
            forward_only=not is_training,
            collect_non_loss_data=not is_training,
        )

    def _rows(
        self, batches: Sequence[PackedBatch], temperature: float, wants_hidden: bool, top: int
    ) -> list[MegatronRow]:
        """Return the rows. Interleaved stages take them in rounds of as many as there are stages, all of one length."""
        missing = -len(batches) % self._num_stages if self._is_interleaved else 0
        all_batches = [*batches, *[_nothing(batches[0])] * missing]
        lengths = [padded_length(batch.num_positions, self._multiple) for batch in all_batches]
        if self._is_interleaved:
            lengths = [max(lengths)] * len(lengths)
        rows = [self._row(batch, length) for batch, length in zip(all_batches, lengths, strict=True)]
        for number, row in enumerate(rows):
            row.number, row.temperature, row.wants_hidden, row.top = number, temperature, wants_hidden, top
        return rows

    def _row(self, batch: PackedBatch, length: int) -> MegatronRow:
        uses_kernel = self._device.type == "cuda" and self._dtype is torch.bfloat16
        return make_row(batch, self._rotary, length, self._tally_2, device=self._device, varlen=uses_kernel)

    def _disagreement(self) -> dict[str, float]:
        """The report of this replica's routers since the last call. Collective over its ranks, which share the
        tokens."""
        for group in (groups.tensor(), groups.context(), groups.pipeline()):
            dist.all_reduce(self._tally_2, group=group)
        report = disagreement(self._tally_2)
        self._tally_2.zero_()
        return report

    def _width_of(self, batches: Sequence[PackedBatch], is_hidden: bool, top: int) -> tuple[int, ...]:
        """Return the shape of what a token has."""
        if is_hidden:
            return (self._width,)
        if top:
            return min(top, self._vocabulary), 2
        if any(batch.wants_confidence for batch in batches):
            return (3,)
        candidates = [batch.candidates_TC.shape[1] for batch in batches if batch.candidates_TC is not None]
        return (2 + candidates[0],) if candidates else ()

    def _shared(
        self, outputs: list[torch.Tensor], batches: Sequence[PackedBatch], width: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the last stage's outputs on all stages."""
        group = groups.pipeline()
        if group.size() == 1:
            return outputs
        tokens = [batch.num_tokens for batch in batches]
        whole = (
            torch.cat([output.reshape(-1, *width) for output in outputs])
            if outputs
            else torch.empty(sum(tokens), *width, dtype=dtype, device=self._device)
        )
        dist.broadcast(whole, group=group, group_src=(self._num_stages - 1))
        return list(torch.split(whole, tokens))

    def _from_last_stage(self, reports: Reports) -> Reports:
        """Return the last stage's reports on all stages."""
        group = groups.pipeline()
        if group.size() == 1:
            return reports
        encoded = msgspec.msgpack.encode(reports)
        size = torch.tensor(len(encoded), device=self._device)
        dist.broadcast(size, group=group, group_src=(self._num_stages - 1))
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if group.rank() == (self._num_stages - 1):
            buffer = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        dist.broadcast(buffer, group=group, group_src=(self._num_stages - 1))
        return msgspec.msgpack.decode(buffer.cpu().numpy().tobytes(), type=Reports)

    def _over_replicas(self, total: torch.Tensor) -> float:
        """Sum over one rank of each replica's last stage, which knows the total."""
        own = groups.tensor().rank(), groups.context().rank(), groups.pipeline().rank()
        is_counted = own == (0, 0, self._num_stages - 1)
        return sum_over_ranks(float(total) if is_counted else 0.0, self._device)


def _forward(finish: Callable[..., Any], rows: Iterator[MegatronRow], model: nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through one stage; return its output and the function that finishes it on the last stage."""
    row = next(rows)
    group = groups.context()
    token_ids = row.part(row.token_ids_P, group.rank(), group.size())[None]
    output = model(token_ids, None, None, packed_seq_params=row)
    return output, functools.partial(finish, row)


def _nothing(batch: PackedBatch) -> PackedBatch:
    """Return an empty micro-batch for `batch`."""
    return PackedBatch(
        token_ids_T=batch.token_ids_T[:0],
        position_ids_T=batch.position_ids_T[:0],
        cu_seqlens=batch.cu_seqlens[:1],
        loss_mask_T=batch.loss_mask_T[:0],
        behavior_logprobs_T=batch.behavior_logprobs_T[:0],
        advantages_T=batch.advantages_T[:0],
        lags_T=batch.lags_T[:0],
    )

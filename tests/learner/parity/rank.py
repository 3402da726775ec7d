"""One rank under torchrun: job after job, and what came out of each into its directory.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.learner.parity.rank JOBS.json

A job that hangs ends the process with a traceback of where it stood.
"""

import dataclasses
import faulthandler
import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import concatenate, plan
from headway.learner.config import ComputeConfig, ModelConfig
from tests.learner.tiny import ratio_loss

from .cases import LEARNING_RATE, OPTIMIZER, TEMPERATURE, Job, read_jobs
from .data import denominator, step_sequences
from .models import SHAPES
from .moments import Tensors
from .outcome import REFUSED, RankReport, error_path, report_path

JOB_DEADLINE_S = 120


def main(path: Path) -> None:
    torch.set_num_threads(1)
    for job in read_jobs(path):
        faulthandler.dump_traceback_later(JOB_DEADLINE_S, exit=True)
        run(job)
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(job: Job) -> None:
    """Run the job. The rank's report is written last: it says that the job is done."""
    rank = int(os.environ["RANK"])
    try:
        report = _carried_out(job)
    except Exception:
        error_path(job, rank).write_text(traceback.format_exc())
        raise
    partial = job.directory / f"rank_{rank}.partial"
    partial.write_bytes(msgspec.json.encode(report))
    partial.rename(report_path(job, rank))


def _carried_out(job: Job) -> RankReport:
    if job.resume is not None and not job.resume.exists():
        return RankReport(undone=f"there is no {job.resume}")
    try:
        backend = _opened(job)
    except ConfigError as error:
        return RankReport(undone=f"{REFUSED}{error}")
    report = _trained(backend, job)
    _close(backend)
    return report


def _opened(job: Job) -> Backend:
    return open_backend(
        job.case.backend,
        ModelConfig(path=str(job.model), dtype=job.setting.dtype),
        OPTIMIZER,
        device=job.setting.device,
        layout=job.case.layout,
        compute=ComputeConfig(recompute=job.case.recompute),
    )


def _close(backend: Backend) -> None:
    """Close the backend, if it holds anything that outlives it."""
    close = getattr(backend, "close", None)
    if close is not None:
        close()


def _trained(backend: Backend, job: Job) -> RankReport:
    if job.resume is None:
        _export(backend, job.directory / "before.safetensors")
        save_file(_computed(backend, job), job.directory / f"rank_{backend.rank}.safetensors")
    else:
        backend.load(job.resume)
    results = [_step(backend, job, step) for step in job.steps]
    _export(backend, job.directory / "after.safetensors")
    losses, norms = map(list, zip(*results, strict=True))
    return RankReport(replicas=backend.replicas, losses=losses, norms=norms)


def _step(backend: Backend, job: Job, step: int) -> tuple[float, float]:
    batches = _batches(backend, job, step)
    loss = ratio_loss(batches, denominator(step_sequences(SHAPES[job.setting.shape], step)))
    value, norm, _ = backend.step(batches, loss, TEMPERATURE, LEARNING_RATE)
    backend.save(job.checkpoint(step + 1))
    return value, norm


def _batches(backend: Backend, job: Job, step: int) -> list[PackedBatch]:
    """Return the batches of a step. In all steps but the first, shared tokens are computed once, and the loss has a
    bonus for entropy."""
    shape = SHAPES[job.setting.shape]
    given = step_sequences(shape, step)
    planned = plan(shape.lengths, backend.replicas, shape.micro_batch_tokens)[backend.replica]
    batches = [concatenate([given[index] for index in chosen], is_tree=step > 0) for chosen in planned]
    return [dataclasses.replace(batch, wants_confidence=step > 0) for batch in batches]


def _export(backend: Backend, path: Path) -> None:
    """Gather the tensors on every rank, and write them on rank 0."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in backend.named_tensors()}
    if backend.rank == 0:
        save_file(tensors, path)


def _computed(backend: Backend, job: Job) -> Tensors:
    """Return the results of the first forward pass for the sequences of this rank's replica."""
    shape = SHAPES[job.setting.shape]
    places = plan(shape.lengths, backend.replicas, shape.micro_batch_tokens)[backend.replica]
    batches = _batches(backend, job, 0)
    found = _by_sequence("logprobs", backend.logprobs(batches, TEMPERATURE), batches, places)
    if hasattr(backend, "hidden"):
        found |= _by_sequence("logits", _logits(backend, batches), batches, places)
    return found


def _by_sequence(kind: str, values: list[torch.Tensor], batches: list[PackedBatch], places: list[list[int]]) -> Tensors:
    found: Tensors = {}
    for value_T, batch, here in zip(values, batches, places, strict=True):
        lengths = batch.cu_seqlens.diff().tolist()
        for place, piece in zip(here, torch.split(value_T.float().cpu(), lengths), strict=True):
            found[f"{kind}.{place}"] = piece.clone()
    return found


@torch.no_grad()
def _logits(backend: Backend, batches: list[PackedBatch]) -> list[torch.Tensor]:
    """Return the logits [T, V] in fp32, from the exported head and the hidden states that every rank has."""
    tensors = dict(backend.named_tensors())
    head_VH = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float().clone()
    hidden: list[torch.Tensor] = [backend.hidden(batch) for batch in batches]  # type: ignore[attr-defined]  # only there to be compared
    return [hidden_TH.float() @ head_VH.to(hidden_TH.device).T for hidden_TH in hidden]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

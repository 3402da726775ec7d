"""The outcome of a run, and the distance between two outcomes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from .cases import Job
from .moments import Tensors, moments

OF_SEQUENCES = ("logits", "logprobs")
"""Kinds of tensors that each rank has for the sequences of its own replica."""


REFUSED = "refused: "


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank on its job."""

    undone: str = ""
    """The reason why nothing was trained: `REFUSED` and the backend's words, where it does not offer the layout."""
    replicas: int = 0
    losses: list[float] = []
    norms: list[float] = []


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The values of the steps that were taken, the last of which is the same in all."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensors]
    """The tensors by kind: logits and logprobs before the first step, parameters and moments after the last.

    The former are named by sequence, the latter by Hugging Face name. A resumed run has only the latter.
    """


def report_path(job: Job, rank: int) -> Path:
    return job.directory / f"rank_{rank}.json"


def error_path(job: Job, rank: int) -> Path:
    """Return the path to which a rank that fails writes its traceback."""
    return job.directory / f"rank_{rank}.error"


def reports(job: Job) -> list[RankReport]:
    """Return the reports of all ranks; empty if one of them did not come to the end."""
    paths = [report_path(job, rank) for rank in range(job.case.processes)]
    if not all(path.exists() for path in paths):
        return []
    return [msgspec.json.decode(path.read_bytes(), type=RankReport) for path in paths]


def outcomes(job: Job) -> Iterator[Outcome]:
    """Yield the outcome of each rank, whose replica computed some of the sequences; rank 0's has the common tensors."""
    together = {
        "parameters": load_file(job.directory / "after.safetensors"),
        **moments(job.case.backend, job.checkpoint(job.steps.stop), job.model),
    }
    for rank, report in enumerate(reports(job)):
        computed = load_file(job.directory / f"rank_{rank}.safetensors") if job.resume is None else {}
        kinds = {kind: _of_kind(kind, computed) for kind in OF_SEQUENCES}
        tensors = {kind: values for kind, values in kinds.items() if values} | together
        yield Outcome(losses=report.losses, norms=report.norms, tensors=tensors)
        together = {}


def _of_kind(kind: str, computed: Tensors) -> Tensors:
    return {name.removeprefix(f"{kind}."): value for name, value in computed.items() if name.startswith(f"{kind}.")}


def merged(parts: list[Outcome]) -> Outcome:
    """Return the sequences of all replicas in one outcome."""
    tensors: dict[str, Tensors] = {}
    for part in parts:
        for kind, values in part.tensors.items():
            tensors.setdefault(kind, {}).update(values)
    return Outcome(losses=parts[0].losses, norms=parts[0].norms, tensors=tensors)


def deviations(got: Outcome, expected: Outcome, start: Tensors) -> dict[str, float]:
    """Return, by kind, the largest |got - expected| / |expected| over its tensors, in Frobenius norms.

    Parameters are divided by the norm of their change since `start`, losses by the largest one of a step, because the
    terms of a single loss may cancel each other.
    """
    found = {"loss": _apart(got.losses, expected.losses), "grad_norm": _apart(got.norms, expected.norms)}
    for kind, values in got.tensors.items():
        zeros = start if kind == "parameters" else {}
        found[kind] = max(
            relative(value, expected.tensors[kind][name], zeros.get(name)) for name, value in values.items()
        )
    return found


def _apart(got: list[float], expected: list[float]) -> float:
    """Return the largest difference in a step that both took, over the largest number of all steps."""
    differences = [abs(ours - theirs) for ours, theirs in zip(got, expected[-len(got) :], strict=True)]
    return max(differences) / max(map(abs, expected))


def relative(got: torch.Tensor, expected: torch.Tensor, zero: torch.Tensor | None = None) -> float:
    """Return the relative distance, computed in float64.

    It is 0 where both are exactly `zero`, and infinity where a number is not finite.
    """
    distance = (got.double() - expected.double()).norm().item()
    size = (expected.double() - (0.0 if zero is None else zero.double())).norm().item()
    if not distance < float("inf"):
        return float("inf")
    return distance / size if size else distance and float("inf")

"""The finding on a case: its distance from the expected values, and whether that is too far."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from .baseline import Baseline
from .cases import Job
from .moments import Tensors
from .outcome import REFUSED, Outcome, deviations, merged, outcomes, reports

RESUMED = "resumed_"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The finding on one case."""

    name: str
    problems: list[str] = []
    """The problems; empty where the case equals the expected values within the tolerance."""
    deviations: dict[str, float] = {}
    """The largest deviation of every kind; `resumed_` marks the run that went on from another layout's checkpoint."""
    seconds: float = 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the backend said that it does not offer the layout."""
        return any(problem.startswith(REFUSED) for problem in self.problems)


def judge(fresh: Job, resumption: Job, baseline: Baseline) -> Finding:
    """Judge two runs that came to their ends."""
    problems = [*_undone(fresh), *_undone(resumption)]
    found: dict[str, float] = {}
    if not problems:
        got, resumed = list(outcomes(fresh)), list(outcomes(resumption))
        found = _deviations(got, baseline, "") | _deviations(resumed, baseline, RESUMED)
        problems = [
            *_inexact_files(fresh),
            *_incomplete(merged(got), baseline),
            *_excesses(found, baseline.tolerances),
        ]
    return Finding(name=fresh.case.name, problems=problems, deviations=found)


def _undone(job: Job) -> Iterator[str]:
    """Yield the reason why a run trained nothing, or that it used another layout than it should."""
    for report in reports(job)[:1]:
        if report.undone:
            yield report.undone
        elif report.replicas != job.case.replicas:
            yield f"{report.replicas} replicas instead of {job.case.replicas}"


def _deviations(ranks: list[Outcome], baseline: Baseline, prefix: str) -> dict[str, float]:
    """Return the largest deviation of every kind over the ranks."""
    found: dict[str, float] = {}
    for outcome in ranks:
        for kind, apart in deviations(outcome, baseline.expected, baseline.start).items():
            found[prefix + kind] = max(apart, found.get(prefix + kind, 0.0))
    return found


def _incomplete(got: Outcome, baseline: Baseline) -> Iterator[str]:
    """Yield sequences, parameters and moments that were not compared; logits count only where a backend shows them."""
    for kind, expected in baseline.expected.tensors.items():
        names = got.tensors.get(kind, {}).keys()
        if names != expected.keys() and (names or kind != "logits"):
            yield f"{kind}: {sorted(names ^ expected.keys())[:5]} are not in both"


def _inexact_files(job: Job) -> Iterator[str]:
    """Yield Hugging Face files whose tensors changed bits in a load and an export, or in a checkpoint."""
    if not _same(load_file(job.directory / "before.safetensors"), _files(job.model)):
        yield "the export at the start differs from the loaded files"
    if not _same(load_file(job.directory / "after.safetensors"), _files(job.checkpoint(job.steps.stop))):
        yield "the checkpoint's Hugging Face files differ from the export"


def _files(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _same(exported: Tensors, files: Tensors) -> bool:
    """Whether the tensors are equal, up to the number format of the export."""
    return exported.keys() == files.keys() and all(
        torch.equal(tensor, files[name].to(tensor.dtype)) for name, tensor in exported.items()
    )


def _excesses(found: dict[str, float], tolerances: dict[str, float]) -> Iterator[str]:
    for kind, apart in found.items():
        allowed = tolerances[kind.removeprefix(RESUMED)]
        if not apart <= allowed:
            yield f"{kind} deviates by {apart:.2g}, over {allowed:.2g}"

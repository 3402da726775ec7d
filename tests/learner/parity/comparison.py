"""Cases of one setting in one directory. Findings are kept, so that an interrupted comparison goes on."""

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .baseline import Baselines
from .cases import STEPS, Case, Job, Setting
from .finding import Finding, judge
from .launch import launch


class Comparison:
    """Jobs and findings under `directory`."""

    def __init__(self, directory: Path, setting: Setting) -> None:
        self._directory = directory
        self._setting = setting
        self._baselines = Baselines(directory, setting)

    def run(self, cases: Sequence[Case]) -> Iterator[Finding]:
        """Yield findings as cases end: first those that were found equal before, then those of the fewest processes.

        Every case also resumes the checkpoint of the case before it that has the same backend and model; the first one
        resumes its own.
        """
        ordered = sorted(cases, key=lambda case: case.processes)
        kept = {case: finding for case in ordered if (finding := self._kept(case)) and not finding.problems}
        yield from kept.values()
        waiting = [(case, other) for case, other in _chained(ordered) if case not in kept]
        for _, pairs in itertools.groupby(waiting, lambda pair: pair[0].processes):
            yield from self._run(list(pairs))

    def _run(self, pairs: list[tuple[Case, Case]]) -> Iterator[Finding]:
        """Run cases of equally many processes, each with the case whose checkpoint it resumes."""
        for case, _ in pairs:
            shutil.rmtree(self._folder(case), ignore_errors=True)
            self._baselines.of(case.backend, case.model)
        jobs = [job for case, other in pairs for job in (self._job(case), self._resumption(case, other))]
        began, ended = time.monotonic(), launch(jobs)
        for (case, other), first, second in zip(pairs, ended, ended, strict=False):
            finding = self._finding(first, second)
            finding = msgspec.structs.replace(finding, seconds=round(time.monotonic() - began, 1))
            self._path(case).write_bytes(msgspec.json.encode(finding))
            self._clear(case, other)
            yield finding
            began = time.monotonic()

    def _finding(self, first: tuple[Job, str], second: tuple[Job, str]) -> Finding:
        (fresh, failure), (resumption, other_failure) = first, second
        if failure or other_failure:
            return Finding(name=fresh.case.name, problems=[words for words in (failure, other_failure) if words])
        return judge(fresh, resumption, self._baselines.of(fresh.case.backend, fresh.case.model))

    def _kept(self, case: Case) -> Finding | None:
        path = self._path(case)
        return msgspec.json.decode(path.read_bytes(), type=Finding) if path.exists() else None

    def _clear(self, case: Case, other: Case) -> None:
        """Keep only the checkpoint that the next case resumes."""
        shutil.rmtree(self._resumption(case, other).directory)
        fresh = self._job(case)
        shutil.rmtree(fresh.checkpoint(STEPS), ignore_errors=True)
        for tensors in fresh.directory.glob("*.safetensors"):
            tensors.unlink()

    def _job(self, case: Case) -> Job:
        model = self._baselines.model(case.model)
        return Job(case=case, setting=self._setting, model=model, directory=self._folder(case) / "fresh")

    def _resumption(self, case: Case, other: Case) -> Job:
        checkpoint = self._job(other).checkpoint(1)
        return msgspec.structs.replace(self._job(case), directory=self._folder(case) / "resumed", resume=checkpoint)

    def _folder(self, case: Case) -> Path:
        return self._directory / case.name

    def _path(self, case: Case) -> Path:
        return self._directory / f"{case.name}.json"


def _chained(cases: Sequence[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield (case, the case before it of the same backend and model, or itself)."""
    latest: dict[tuple[str, str], Case] = {}
    for case in cases:
        key = (case.backend, case.model)
        yield case, latest.get(key, case)
        latest[key] = case

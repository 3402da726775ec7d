"""Gives GPUs to measurements, in their order, as they become free."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpus import NO_MULTICAST
from benchmarks.peers.processes import Group

from .measurement import WHOLE, Machine, Measurement

LOOK_S = 0.2
ENVIRONMENT = {**NO_MULTICAST, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
"""The environment of all measurements, unless it is set otherwise. FlashInfer is not installed everywhere."""


@dataclass
class Running:
    """A measurement that has its GPUs."""

    of: Measurement
    gpus: tuple[str, ...]
    began: float
    until: float
    """The time at which it is ended."""
    group: Group | None = None
    code: int | None = None
    """Its exit code; None if it was ended."""
    ending: "Future[None] | None" = None
    """Its processes are being ended."""


class Schedule:
    """Measurements of a machine. Whatever is running when its block is left is ended."""

    def __init__(self, measurements: Sequence[Measurement], machine: Machine, say: Callable[[str], None]) -> None:
        self._waiting = list(measurements)
        self._machine = machine
        self._say = say
        self._free = dict.fromkeys(machine.gpus, WHOLE)
        self._lost: set[str] = set()
        """GPUs on which processes of a measurement may be left."""
        self._running: list[Running] = []
        self._enders = ThreadPoolExecutor(thread_name_prefix="ends")
        self.ended: dict[str, bool] = {}
        """Whether those that are over ended well, by name."""

    def run(self, seconds: float) -> None:
        """Run all for which enough of so many seconds from now are left, and end what is running then.

        One whose result is there counts as ended well; one that comes after another that did not is left out.
        """
        deadline = self._now() + seconds
        with ExitStack() as left:
            left.callback(self._end)
            while True:
                self._collect()
                self._start(deadline)
                if not self._running:
                    for one in self._waiting:
                        self._say(
                            f"{one.name} was not begun: too few GPUs or seconds are left, or one before it was not"
                        )
                    return
                self._pause()

    def _collect(self) -> None:
        for one in tuple(self._running):
            if not self._is_over(one):
                continue
            self._running.remove(one)
            if self._has_left(one):
                self._lost |= {*one.gpus}
            else:
                for gpu in one.gpus:
                    self._free[gpu] += one.of.quarters
            self.ended[one.of.name] = one.code == 0 and self._has_kept(one.of)
            how = {None: "was ended at its limit", 0: "ended"}.get(one.code, f"failed with exit code {one.code}")
            if one.code == 0 and not self.ended[one.of.name]:
                how = "ended without a result"
            self._say(f"{one.of.name} {how} after {self._now() - one.began:.0f} s, {one.of.likely_s} were likely")

    def _start(self, deadline: float) -> None:
        """Start what can be; one that waits for GPUs alone keeps those that it will have from all after it."""
        kept: set[str] = set()
        for one in tuple(self._waiting):
            if result_of(self._machine.output, one.name).exists():
                self._leave_out(one, ended_well=True)
            elif any(self.ended.get(before) is False for before in one.after):
                self._leave_out(one, ended_well=False)
            elif self._now() + one.least_s <= deadline and self._is_ready(one):
                gpus = self._gpus_for(one, kept)
                if gpus is None:
                    kept.update(self._next_free(one, kept, deadline))
                    continue
                self._waiting.remove(one)
                for gpu in gpus:
                    self._free[gpu] -= one.quarters
                self._say(f"{one.name} starts on {','.join(gpus)}, load {os.getloadavg()[0]:.1f}")
                now = self._now()
                running = Running(one, gpus, now, min(now + one.seconds, deadline))
                self._running.append(running)
                self._begin(running)

    def _leave_out(self, one: Measurement, *, ended_well: bool) -> None:
        self._waiting.remove(one)
        self.ended[one.name] = ended_well
        self._say(f"{one.name} " + ("has its result" if ended_well else "is left out: one before it failed"))

    def _is_ready(self, one: Measurement) -> bool:
        """Whether all before it has ended, and none that it takes turns with is running."""
        running = [other.of for other in self._running]
        made = {other.name for other in (*self._waiting, *running)}
        is_its_turn = not one.in_turn or one.in_turn not in {other.in_turn for other in running}
        return is_its_turn and not made & {*one.after, *one.following}

    def _gpus_for(self, one: Measurement, kept: Collection[str]) -> tuple[str, ...] | None:
        """Return GPUs with room for it, those with the least first; None if they are too few."""
        away = self._lost.union(kept)
        room = [gpu for gpu, free in self._free.items() if free >= one.quarters and gpu not in away]
        least = sorted(room, key=lambda gpu: self._free[gpu])[: one.gpus]
        return tuple(gpu for gpu in self._free if gpu in least) if len(least) == one.gpus else None

    def _next_free(self, one: Measurement, kept: Collection[str], deadline: float) -> list[str]:
        """Return the GPUs that are likely to have room for it first; [] if it is likely to have them too late."""
        busy = {gpu: math.inf if gpu in self._lost else 0.0 for gpu in self._free if gpu not in kept}
        for other in self._running:
            for gpu in busy.keys() & other.gpus:
                if self._free[gpu] < one.quarters:
                    busy[gpu] = max(busy[gpu], other.began + other.of.likely_s)
        first = sorted(busy, key=lambda gpu: busy[gpu])[: one.gpus]
        return first if all(busy[gpu] + one.least_s <= deadline for gpu in first) else []

    def _now(self) -> float:
        return time.monotonic()

    def _pause(self) -> None:
        time.sleep(LOOK_S)

    def _begin(self, one: Running) -> None:
        seen = (*one.gpus, *(gpu for gpu in self._machine.gpus if gpu not in one.gpus))[: one.of.sees or len(one.gpus)]
        environment = {**ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(seen)}
        out, log = (self._machine.output / f"{one.of.name}.{end}" for end in ("out", "log"))
        with out.open("w") as output, log.open("w") as words:
            one.group = Group(
                (str(one.of.python or sys.executable), *one.of.command), environment, output=output, words=words
            )

    def _is_over(self, one: Running) -> bool:
        """Whether it and all its processes have ended. Others go on while its processes are being ended."""
        assert one.group is not None
        if one.ending is None:
            one.code = one.group.poll()
            if one.code is None and self._now() < one.until:
                return False
            one.ending = self._enders.submit(one.group.end)
        return one.ending.done()

    def _has_left(self, one: Running) -> bool:
        """Whether processes of it may be left, since to end them failed: they would be measured with whatever had its
        GPUs next."""
        error = one.ending.exception() if one.ending is not None else None
        if error is not None:
            self._say(f"{one.of.name} may go on: its processes could not be ended ({error!r}); its GPUs stay taken")
        return error is not None

    def _has_kept(self, one: Measurement) -> bool:
        return keep_result(self._machine.output, one.name)

    def _end(self) -> None:
        for one in self._running:
            if one.group is not None and one.ending is None:
                one.ending = self._enders.submit(one.group.end)
        self._enders.shutdown()  # waits for all of them
        for one in self._running:
            self._has_left(one)


def result_of(output: Path, name: str) -> Path:
    """Return the file of a measurement's result."""
    return output / f"{name}.json"


def keep_result(output: Path, name: str) -> bool:
    """Write the last line that it printed as its result, words as a string of JSON. False if it printed nothing."""
    lines = (output / f"{name}.out").read_text().splitlines()
    if not lines:
        return False
    try:
        json.loads(lines[-1])
    except ValueError:
        lines[-1] = json.dumps(lines[-1])
    result_of(output, name).write_text(lines[-1] + "\n")
    return True

"""Gives GPUs to measurements, in their order, as they become free."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.processes import Group

from .measurement import WHOLE, Machine, Measurement

LOOK_S = 0.2


@dataclass
class _Running:
    of: Measurement
    gpus: tuple[str, ...]
    group: Group
    until: float
    began: float


class Schedule:
    """Measurements of a machine. Whatever is running when its block is left is ended."""

    def __init__(self, measurements: Sequence[Measurement], machine: Machine, say: Callable[[str], None]) -> None:
        self._waiting = list(measurements)
        self._machine = machine
        self._say = say
        self._free = dict.fromkeys(machine.gpus, WHOLE)
        self._running: list[_Running] = []
        self.ended: dict[str, bool] = {}
        """Whether those that are over ended well, by name."""

    def run(self, seconds: float) -> None:
        """Run all of which the limit is within so many seconds from now.

        One whose result is there counts as ended well; one that comes after another that did not is left out.
        """
        deadline = time.monotonic() + seconds
        with ExitStack() as left:
            left.callback(self._end)
            while True:
                self._collect()
                self._start(deadline)
                if not self._running:
                    return
                time.sleep(LOOK_S)

    def _collect(self) -> None:
        for one in tuple(self._running):
            code = one.group.poll()
            if code is None and time.monotonic() < one.until:
                continue
            one.group.end()
            self._running.remove(one)
            for gpu in one.gpus:
                self._free[gpu] += one.of.quarters
            self.ended[one.of.name] = code == 0 and keep_result(self._machine.output, one.of.name)
            how = {None: "was ended at its limit", 0: "ended"}.get(code, f"failed with exit code {code}")
            self._say(f"{one.of.name} {how} after {time.monotonic() - one.began:.0f} s")

    def _start(self, deadline: float) -> None:
        """Start what can be; one that waits for GPUs alone lets none after it go first."""
        for one in tuple(self._waiting):
            if result_of(self._machine.output, one.name).exists():
                self._leave_out(one, ended_well=True)
            elif any(self.ended.get(before) is False for before in one.after):
                self._leave_out(one, ended_well=False)
            elif time.monotonic() + one.seconds <= deadline and self._is_ready(one):
                gpus = self._gpus_for(one)
                if not gpus:
                    return
                self._waiting.remove(one)
                self._running.append(self._started(one, gpus))

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

    def _gpus_for(self, one: Measurement) -> tuple[str, ...]:
        """Return GPUs with room for it, those with the least first; () if they are too few."""
        room = [gpu for gpu, free in self._free.items() if free >= one.quarters]
        least = sorted(room, key=lambda gpu: self._free[gpu])[: one.gpus]
        return tuple(gpu for gpu in self._free if gpu in least) if len(least) == one.gpus else ()

    def _started(self, one: Measurement, gpus: tuple[str, ...]) -> _Running:
        for gpu in gpus:
            self._free[gpu] -= one.quarters
        self._say(f"{one.name} starts on {','.join(gpus)}, load {os.getloadavg()[0]:.1f}")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        out, log = (self._machine.output / f"{one.name}.{end}" for end in ("out", "log"))
        with out.open("w") as output, log.open("w") as words:
            group = Group((sys.executable, *one.command), environment, output=output, words=words)
        now = time.monotonic()
        return _Running(one, gpus, group, until=now + one.seconds, began=now)

    def _end(self) -> None:
        for one in self._running:
            one.group.end()


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

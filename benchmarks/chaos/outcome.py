"""The outcome of a trial, with the memory, descriptors and threads of its processes."""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from .journal import TurnAudit
from .worker import Tally

LONG_MINUTES = 3.0
"""In a trial of so many minutes each fault that `missing` looks for strikes seven times or more, on average."""
ROLES = ("worker", "learner", "server")
KILLED = {"": (*ROLES, "scorer"), "hosted": (*ROLES, "host"), "outside": (*ROLES, "agents")}
"""What is killed, by who plays the samples."""


class EpisodeFigures(TurnAudit, frozen=True, kw_only=True):
    """The audit of agents' turns, and what going on at a turn has saved."""

    episodes_resumed: int
    """The number of times that an episode went on after a lost worker or host process."""
    turns_resumed: int
    tokens_saved: int
    tokens_saved_share: float
    """Of all tokens that would have been sampled if each of these had begun anew."""
    tool_calls_saved: int
    """Calls in these turns that were not made again: agents from outside go on, while hosted ones are run again."""
    tool_calls_saved_share: float

    @classmethod
    def of(cls, found: TurnAudit, tallies: Sequence[Tally]) -> Self:
        """Return the figures of a trial."""
        names = ("episodes_resumed", "turns_resumed", "tool_calls_resumed", "resumed", "generated")
        total = {name: sum(getattr(tally, name) for tally in tallies) for name in names}
        calls = total["tool_calls_resumed"]
        return cls(
            **msgspec.structs.asdict(found),
            episodes_resumed=total["episodes_resumed"],
            turns_resumed=total["turns_resumed"],
            tokens_saved=total["resumed"],
            tokens_saved_share=_share(total["resumed"], total["generated"]),
            tool_calls_saved=calls,
            tool_calls_saved_share=_share(calls, found.tool_calls),
        )


def _share(saved: int, made: int) -> float:
    return round(saved / max(1, saved + made), 4)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark's JSON."""

    seed: int
    minutes: float
    agents: str
    """Who played multi-turn episodes: hosted agents, or those from outside."""
    rarely: float
    """The factor by which faults were rarer than usual."""
    without: str
    against: str
    """The protection whose faults struck more often."""
    tasks: int
    steps: int
    seconds: float
    finished: bool
    """Whether the run ended; a run that hung has lost all samples that it had not trained by then."""
    struck: dict[str, int]
    """Faults by kind, those that found nothing to strike among them."""
    kills: dict[str, int]
    effective_kills: dict[str, int]
    """Kills that hit a held lease, a batch not yet committed, or weights on their way."""
    held_by_killed: dict[str, int]
    """Samples of killed workers, and requests of killed scorers; others have had all of them, as nothing is lost."""
    expired_leases: int
    """The server's count of expired leases: those of killed workers, and those of stopped and hostile ones."""
    copied_leases: int
    """Samples that another worker got too, because their holders made no progress."""
    stops: dict[str, int]
    crashes: dict[str, int]
    """Ends with an unexpected error; the logs say which."""
    cuts: int
    power_losses: int
    revived_learners: int
    unfenced_learners: int
    """The revived learners that did not end by themselves although another one had claimed the run."""
    unreplaced_learners: int
    """The revived learners to which the run still belonged, because no other one had lived to claim it."""
    leftovers: int
    """Processes of an overwritten run that were woken."""
    unexpelled_leftovers: int
    """The number of leftovers that did not leave by themselves."""
    pills: dict[str, int]
    """Pills sent by hostile workers, by kind."""
    quarantined: int
    """The number of times that a hostile worker got no more leases."""
    junk_requests: dict[str, int]
    """Junk that hostile workers asked of the reward model, by kind."""
    evaluations: int
    """Evaluations that gave a result."""
    skipped_evaluations: int
    """Evaluations that gave none, as the rules have it.

    A power loss took the samples, or every worker that had the version was killed or moved on: the trial has them keep
    it for two seconds, of which a sample takes half, and more where the reward hangs or the machine is busy. The
    learner's log names each with the reason. Evaluations that were under way when a learner died are not counted: the
    next one forgets them.
    """
    hoards: int
    """The number of times that a hostile worker took all leases that it could get, under ever new names."""
    hoarded: int
    """The samples that hostile workers took in this way."""
    rewards_repeated: int
    """Calls of the reward that hung, raised or ended their process, or were in it when another one did."""
    floods: int
    full_disks: int
    broadcasts: bool
    """Whether workers took part in broadcasts; False where all of them pulled."""
    received: int
    """Versions that workers received by broadcast, each counted once a worker."""
    received_by_replacements: int
    """The part of these versions that went to processes in the place of killed ones."""
    full_memory: int
    damaged: int
    repeated_submissions: int
    forgotten_renewals: int
    lost: int
    trained_twice: int
    over_lag_bound: int
    corrupt: int
    off_lineage: int
    off_identity: int
    poisoned: int
    tokens_generated: int
    tokens_resumed: int
    tokens_regenerated: int
    """Tokens that were generated and not trained."""
    episodes: EpisodeFigures | None
    """Where agents played."""
    dead_letters: int
    dropped_by_rule: int
    shows: tuple[str, ...]
    """The names of results that must be 0 or absent, and are not."""
    vitals: dict[str, dict[str, list[float]]]
    """The medians of the memory, descriptors and threads of each role's processes, in each sixth of the trial."""
    covered_by: str
    """The protection that was taken out along with this one, or that makes good its absence."""
    missing: tuple[str, ...] = ()
    """Expected effects of the faults that a long enough trial of the usual mix has not shown, though faults struck on
    for them. The audit is of what did happen, so they are told and do not make it fail."""

    @property
    def is_clean(self) -> bool:
        return self.finished and not self.shows

    def with_missing(self) -> Self:
        """Return this outcome with the expected effects that are missing: of these it proves nothing."""
        if self.against or self.minutes / self.rarely < LONG_MINUTES:
            return self
        effects = {
            **{f"effective kills: {role}": self.effective_kills.get(role, 0) for role in KILLED[self.agents]},
            "expired leases": self.expired_leases,
            "forgotten renewals": self.forgotten_renewals,
            "repeated submissions": self.repeated_submissions,
            "cuts": self.cuts,
            "power losses": self.power_losses,
            "revived learners": self.revived_learners,
            "floods": self.floods,
            "full disks": self.full_disks,
        }
        if self.episodes is not None:
            effects["episodes resumed"] = self.episodes.episodes_resumed
        else:
            effects |= {
                "leftovers": self.leftovers,
                "pills": sum(self.pills.values()),
                "junk requests": sum(self.junk_requests.values()),
                "hoarded": self.hoarded,
                "rewards repeated": self.rewards_repeated,
                "damaged": self.damaged,
            }
        if self.broadcasts:
            effects["received by replacements"] = self.received_by_replacements
        return msgspec.structs.replace(self, missing=tuple(name for name, times in effects.items() if not times))


EVERY_S = 2.0
GROWN_UP_S = 4.0
"""The age in seconds below which a process is still starting."""
PARTS = 6
"""The number of parts of the trial, each of which has a median of its own."""
Sample = tuple[float, float, float]
"""MiB of resident memory, open descriptors, threads."""


class Vitals:
    """Samples the processes that `pids` names, by role."""

    def __init__(self, pids: Callable[[], Mapping[str, list[int]]]) -> None:
        self._pids = pids
        self._samples = defaultdict[str, list[Sample]](list)

    async def watch(self) -> None:
        """Take samples until cancelled."""
        first_seen: dict[int, float] = {}
        while True:
            await asyncio.sleep(EVERY_S)
            now = time.monotonic()
            for role, pids in self._pids().items():
                for pid in pids:
                    if now - first_seen.setdefault(pid, now) >= GROWN_UP_S:
                        with suppress(OSError):  # the process has just ended
                            self._samples[role].append(_sample(pid))

    def trend(self) -> dict[str, dict[str, list[float]]]:
        """Return each measure's median in each part of the trial, by role; fewer parts where there are few samples."""
        return {role: _medians(samples) for role, samples in sorted(self._samples.items())}


def _medians(samples: list[Sample]) -> dict[str, list[float]]:
    size = -(-len(samples) // PARTS)
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    names = ("memory_mib", "descriptors", "threads")
    return {
        name: [round(statistics.median(one[place] for one in part), 1) for part in parts]
        for place, name in enumerate(names)
    }


def _sample(pid: int) -> Sample:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    descriptors = len(os.listdir(process / "fd"))
    threads = len(os.listdir(process / "task"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, descriptors, threads

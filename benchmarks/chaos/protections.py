"""The product with one protection taken out, inside the processes of one trial only, which keeps no experience log.

A script is edited as text. If the text to be replaced is no longer there, the trial fails at once instead of passing.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch
from weakref import WeakKeyDictionary

from headway.broker.client import learner, leases
from headway.broker.client.leases import Leases
from headway.broker.connection import connection, function_library
from headway.broker.schema import Trajectory, WeightVersion
from headway.broker.schema.weights import Probe
from headway.broker.security.sample_validation import validate_sample
from headway.broker.wire import codec
from headway.learner.batching import packing
from headway.learner.experience.stream import Experience
from headway.rollout_workers.agents.session import EpisodeSession
from headway.rollout_workers.samples.recorder import SegmentLog
from headway.weightsync.publisher import Publication, Publisher
from headway.weightsync.tensors.staging import Gathering

MEAN_S = {
    "kill worker": 4.0,
    "kill learner": 11.0,
    "kill server": 30.0,
    "blackout": 40.0,
    "power loss": 14.0,
    "kill scorer": 12.0,
    "stop worker": 16.0,
    "stop learner": 40.0,
    "revive learner": 25.0,
    "stop server": 40.0,
    "cut link": 8.0,
    "fill memory": 45.0,
    "damage blob": 6.0,
    "send pill": 2.5,
    "hoard leases": 25.0,
    "ask junk": 8.0,
    "wake leftover": 15.0,
    "flood": 20.0,
    "fill disk": 25.0,
}
"""The mean seconds between two faults of a kind, exponentially distributed."""

AGENTS_MEAN_S = {
    "kill worker": 8.0,
    "kill learner": 40.0,
    "kill server": 40.0,
    "power loss": 50.0,
    "stop worker": 25.0,
    "stop learner": 60.0,
    "revive learner": 60.0,
    "stop server": 60.0,
    "cut link": 15.0,
    "flood": 40.0,
    "fill disk": 40.0,
    "kill host": 8.0,
    "kill sandbox": 5.0,
    "kill agents": 30.0,
}
"""The same in a trial with agents: an episode takes seconds, and keeps its place until its limit if an agent dies."""


@dataclass(frozen=True)
class Protection:
    """A protection against some faults, which can be taken out to show their effect."""

    take_out: Callable[[], None]
    """Takes the protection out of this process, for good."""
    mean_s: Mapping[str, float]
    """The faults that it protects against, and no others, because others hide their effect: see MEAN_S."""
    covered_by: str = ""
    """A protection with mostly the same effect, which is taken out too, or one that makes good its absence."""
    saves_work: bool = False
    """Whether its absence only costs work, so that a trial that shows nothing is right."""
    agents: Literal["", "hosted", "outside"] = ""
    """Who plays the samples of a trial of it."""


def take_out(name: str) -> None:
    """Take the protection out of this process, for good; the empty name is none."""
    if name:
        PROTECTIONS[name].take_out()


def mean_s_against(name: str, agents: str = "") -> Mapping[str, float]:
    """Return the rate of each fault in a trial of this protection; the empty name is the usual mix."""
    return PROTECTIONS[name].mean_s if name else AGENTS_MEAN_S if agents else MEAN_S


def _owner_fence() -> None:
    """Let a replaced learner go on taking, committing and announcing."""
    _edit("if held ~= incarnation or call('GET', PUBLIC .. 'owner') ~= redis.sha1hex(token) then", "if false then")
    _edit("if not is_ours and number('incarnation') >= tonumber(ARGV[1]) then", "if false then")
    _publish_again()
    _edit("if against < 0 or (compare('offered') < 0 and not is_repeated) then", "if false then")


def _server_fence() -> None:
    """Let no client notice that a server came back without its last second."""
    _publish_again()
    _edit("if server and server ~= '' and server ~= server_id() then", "if false then")


def _lease_token() -> None:
    """Let any submission complete a sample, however late and however often."""
    _edit(
        "local mine = had_round == one.round and (is_holder or (copier and not had_payload)",
        "local mine = had_round == one.round and (true",
    )
    _edit("if mine and had_payload then", "if false then")


def _commit_after_checkpoint() -> None:
    """Forget a batch as soon as it is handed out, and do not bring it back at the next claim."""
    take = Experience.take

    def take_and_commit(self: Experience, step: int, *how: Any, **named: Any) -> object:
        batch = take(self, step, *how, **named)
        self.commit(step + 1)
        return batch

    patch.object(Experience, "take", take_and_commit).start()
    _edit("if is_rewound then forget(mark, step) end", "")


def _over_bound_check() -> None:
    """Let take, packing and the check of samples ignore lag, and let no learner wait for stragglers."""
    _edit("    send_back_old(queue)\n", "")
    _edit("if need > 0 and must_wait(ready, need) then", "if false then")
    patch.object(packing, "is_too_stale", lambda version, step, max_lag: False).start()
    patch.object(learner, "check_lag", lambda trajectory, step, max_lag: None).start()


def _lease_expiry() -> None:
    """Keep the leases of dead workers for ever."""
    _edit("\n  collect_expired()\n", "\n")


def _worker_resubmission() -> None:
    """Let workers forget the samples that they have handed in."""

    async def nothing(self: Leases) -> int:
        return 0

    patch.object(Leases, "confirm", nothing).start()


def _rewind_fork() -> None:
    """Keep samples of an abandoned branch's weights valid."""
    begins = "local function fork(incarnation, step)\n"
    _edit(begins, begins + "  do return end\n")


def _frame_checksum() -> None:
    """Decode frames without a check of their bytes."""
    patch.object(codec, "zlib", SimpleNamespace(crc32=lambda body, kind: 0)).start()


def _identity_check() -> None:
    """Let clients of an overwritten run go on in the run that has its name now."""
    _edit("if held_identity and held_identity ~= IDENTITY then", "if false then")

    def keep(self: connection.Connection, identity: str) -> None:
        self.identity = self.identity or identity

    def check_all_else(trajectory: Trajectory, *what: Any, identity: str, newest: WeightVersion) -> None:
        validate_sample(trajectory, *what, identity=trajectory.identity, newest=newest)

    patch.object(connection.Connection, "check_identity", keep).start()
    patch.object(learner, "validate_sample", check_all_else).start()


def _possible_check() -> None:
    """Take workers' samples without a check."""

    def nothing(*what: Any, **named: Any) -> None: ...

    patch.object(learner, "validate_sample", nothing).start()
    patch.object(learner, "check_lag", nothing).start()
    patch.object(leases, "validate_segment", nothing).start()


def _quarantine() -> None:
    """Let a worker that sends pills go on getting leases."""
    _edit("if holder and call('HINCRBY', P .. 'strikes', holder, 1) >= 3 then", "if false then")


TOLD_FIRST_S = 1.5
_keeping = set[asyncio.Task[None]]()
"""References to the tasks, which the event loop does not keep."""


def _durable_answer() -> None:
    """Tell an agent an answer first, and make it durable later."""
    keep, locks = SegmentLog.keep_all, WeakKeyDictionary[SegmentLog, asyncio.Lock]()

    async def keep_later(self: SegmentLog) -> None:
        async def later() -> None:
            await asyncio.sleep(TOLD_FIRST_S)
            async with locks.setdefault(self, asyncio.Lock()):
                await keep(self)

        _keeping.add(task := asyncio.create_task(later()))
        task.add_done_callback(_keeping.discard)

    patch.object(SegmentLog, "keep_all", keep_later).start()


def _recorded_answers() -> None:
    """Sample each call anew, though an answer to it is recorded."""
    patch.object(EpisodeSession, "_known", lambda self, call: None).start()


def _unseen_turns() -> None:
    """Train the turns of former attempts that the one to the end has not repeated."""
    _recorded_answers()
    patch.object(EpisodeSession, "settle", EpisodeSession.end).start()


_PUBLISHER = "a publisher that refuses to publish a version twice"

PROTECTIONS = {
    "owner_fence": Protection(_owner_fence, {"revive learner": 3.0}, covered_by=_PUBLISHER),
    "server_fence": Protection(_server_fence, {"power loss": 3.0}, covered_by=_PUBLISHER),
    "lease_token": Protection(_lease_token, {"stop worker": 3.0, "kill worker": 8.0}),
    "lease_expiry": Protection(_lease_expiry, {"kill worker": 4.0}),
    "commit_after_checkpoint": Protection(_commit_after_checkpoint, {"kill learner": 5.0}),
    "over_bound_check": Protection(_over_bound_check, {"stop worker": 3.0, "kill worker": 4.0}),
    # After a blackout the server refuses tokens newer than what it still knows of, and takes of the learner those newer
    # than its step. Nothing but the fork refuses those of a step that is reached again by other weights, as it is when
    # a learner dies and a batch that is to be replayed is damaged.
    "rewind_fork": Protection(_rewind_fork, {"kill learner": 4.0, "damage blob": 0.3}),
    "worker_resubmission": Protection(
        _worker_resubmission, {"power loss": 3.0}, covered_by="lost samples are leased again", saves_work=True
    ),
    "frame_checksum": Protection(_frame_checksum, {"damage blob": 0.5}),
    "identity_check": Protection(_identity_check, {"wake leftover": 2.0}),
    "possible_check": Protection(_possible_check, {"send pill": 0.5}),
    "durable_answer": Protection(_durable_answer, {"kill worker": 2.0}, agents="outside"),
    "recorded_answers": Protection(
        _recorded_answers,
        {"cut link": 1.0, "kill worker": 4.0},
        covered_by="turns that no attempt repeats are not trained",
        saves_work=True,
        agents="outside",
    ),
    "unseen_turns": Protection(
        _unseen_turns, {"kill host": 2.0, "kill worker": 5.0}, "recorded_answers", agents="hosted"
    ),
    "quarantine": Protection(_quarantine, {"send pill": 0.5}, covered_by="pills are refused", saves_work=True),
}


def _publish_again() -> None:
    """Let a publisher go back, which otherwise ends a learner whose run has moved on or back."""
    begin = Publisher.begin

    def begin_again(self: Publisher, version: WeightVersion, gathering: Gathering, probe: Probe) -> Publication:
        self._announced = None
        return begin(self, version, gathering, probe)

    patch.object(Publisher, "begin", begin_again).start()


def _edit(old: str, new: str) -> None:
    """Replace `old` in the scripts. Their digest stays, as processes without the edit must understand each other."""
    function_library.protocol()  # which is kept
    original = function_library.script_source
    assert any(old in original(name) for name in function_library.FILES), f"the scripts have changed: no {old!r}"

    @cache
    def edited(name: str) -> str:
        return original(name).replace(old, new)

    patch.object(function_library, "script_source", edited).start()

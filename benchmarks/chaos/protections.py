"""The product with one protection taken out, inside the processes of one trial only, which keeps no experience log.

A script is edited as text. If the text to be replaced is no longer there, the trial fails at once instead of passing.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

from broker import codec, connection
from broker.leases import Leases
from learner import packing
from learner.experience import Experience


def take_out(name: str) -> None:
    """In this process, for good; the empty name is none."""
    if name:
        PROTECTIONS[name]()


def _owner_fence() -> None:
    """A learner that was replaced may go on taking, committing and announcing."""
    _edit("take", "if held[1] ~= incarnation or held[2] ~= redis.sha1hex(token) then", "if false then")
    _edit("version", "if against < 0 or (compare('offered') < 0 and not is_repeated) then", "if false then")


def _server_fence() -> None:
    """Nobody notices that a server came back without its last second."""
    _edit("take", "if server and server ~= '' and server ~= server_id() then", "if false then")


def _lease_token() -> None:
    """Whoever submits completes a sample, however late and however often."""
    _edit(
        "submit", "local mine = had_round == round and (token == ARGV[2] or ARGV[6] == '1')", "local mine = had_round"
    )
    _edit("submit", "if mine and had_payload then", "if false then")


def _commit_after_checkpoint() -> None:
    """A batch is forgotten as soon as it is handed out, and the next claim does not bring it back."""
    take = Experience.take

    def take_and_commit(self: Experience, step: int) -> object:
        batch = take(self, step)
        self.commit(step + 1)
        return batch

    patch.object(Experience, "take", take_and_commit).start()
    _edit("claim", "local is_rewound = step < committed and tonumber(ARGV[6]) < committed", "local is_rewound = false")


def _over_bound_check() -> None:
    """Neither take nor packing looks at lag, and nobody waits for stragglers."""
    _edit("take", "  sweep_old(queue)\n", "")
    _edit("take", "if need > 0 and must_wait(ready, need) then", "if false then")
    patch.object(packing, "is_too_stale", lambda version, step, max_lag: False).start()


def _lease_expiry() -> None:
    """What a dead worker held stays held."""
    _edit("lease", "\ncollect_expired()\n", "\n")


def _worker_resubmission() -> None:
    """Workers forget what they have handed in."""

    async def nothing(self: Leases) -> int:
        return 0

    patch.object(Leases, "confirm", nothing).start()


def _rewind_fork() -> None:
    """What an abandoned branch's weights sampled stays valid."""
    _edit("version", "if what == 'announced' and before and step < before then", "if false then")
    _edit("submit", "is_void = is_void or is_abandoned(tonumber(ARGV[b]), tonumber(ARGV[b + 1]))", "")


def _frame_checksum() -> None:
    """Bytes are believed."""
    patch.object(codec, "zlib", SimpleNamespace(crc32=lambda body, kind: 0)).start()


PROTECTIONS: dict[str, Callable[[], None]] = {
    "owner_fence": _owner_fence,
    "server_fence": _server_fence,
    "lease_token": _lease_token,
    "lease_expiry": _lease_expiry,
    "commit_after_checkpoint": _commit_after_checkpoint,
    "over_bound_check": _over_bound_check,
    "rewind_fork": _rewind_fork,
    "worker_resubmission": _worker_resubmission,
    "frame_checksum": _frame_checksum,
}


def _edit(script: str, old: str, new: str) -> None:
    """Replace `old` in the script, and wherever else it stands (the shared prelude)."""
    original = connection.script_source
    assert old in original(script), f"{script}.lua has changed: {old!r} is not in it any more"

    @cache
    def edited(name: str) -> str:
        return original(name).replace(old, new)

    patch.object(connection, "script_source", edited).start()
    connection.script_digest.cache_clear()

"""Refuses to overwrite or delete a living run by mistake, wherever its learner and workers are."""

import os
import socket
from datetime import datetime

import psutil

from headway.broker.client.broker import BlockingBroker
from headway.broker.client.usage import HEARTBEAT_TTL_S, LearnerInfo, RunUsers
from headway.broker.errors import HeadwayError
from headway.rollout_workers.run_end import RUN_OVER

PATIENCE_S = 3.0
"""Seconds to wait for the broker: a user waits for the answer."""
_NAMED = 3


def refuse_if_in_use(url: str, run: str, *, by_workers: bool = True) -> None:
    """Raise HeadwayError, which names the processes, if a learner or workers of the run are alive. Without `by_workers`
    neither workers count, nor a process of this machine that has ended since it was heard of."""
    client = BlockingBroker(url, run, timeout_s=PATIENCE_S)
    try:
        use = client.call(client.broker.heartbeat.users())
    finally:
        client.close()
    if not by_workers:
        use = RunUsers(state=use.state, learner=None if _has_ended(use.learner) else use.learner, workers=())
    if users := _users(use):
        raise HeadwayError(
            f"Run {run} is in use ({use.state}): {'; '.join(users)}. Stop them (a killed one is forgotten"
            f" after {HEARTBEAT_TTL_S:g} s), choose another run.name, or take the run from them with --force."
        )


def _has_ended(holder: LearnerInfo | None) -> bool:
    """Whether it was this process, or one of this machine that is not there any more."""
    if holder is None or holder.host != socket.gethostname():
        return False
    return holder.pid == os.getpid() or not psutil.pid_exists(holder.pid)


def _users(use: RunUsers) -> list[str]:
    users = [] if use.learner is None else [f"its learner is {described(use.learner)}"]
    if use.workers and use.state not in (*RUN_OVER, "absent"):
        more = f" and {len(use.workers) - _NAMED} more" if len(use.workers) > _NAMED else ""
        users.append(f"{len(use.workers)} workers are alive: {', '.join(use.workers[:_NAMED])}{more}")
    return users


def described(holder: LearnerInfo) -> str:
    """Return words such as `process 12 of ali on gpu-3, since 2026-11-23 07:00:12`, with the time of this machine."""
    since = datetime.fromtimestamp(holder.since).strftime("%Y-%m-%d %H:%M:%S")
    return f"process {holder.pid} of {holder.user} on {holder.host}, since {since}"

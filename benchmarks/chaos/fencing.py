"""The fate of a learner that came back when another one had claimed its run, and has to leave."""

import asyncio
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Literal

from .witness import Witness

WITHIN_S = 15.0
POLL_S = 0.2


async def fate_of(
    learner: BaseProcess, incarnation: Callable[[], int], witness: Witness, within_s: float = WITHIN_S
) -> Literal["left", "unfenced", "unreplaced"]:
    """Return the fate of a learner that has claimed an incarnation, perhaps replaced by a later one.

    `unfenced`: it still runs though the server has said for `within_s` that a later one has claimed the run.
    `unreplaced`: the server has not said so for as long. The learner's replacement was killed before it could claim the
    run, or the server has lost the claim with its last second: the run is still this learner's.
    """
    replaced_s = alone_s = 0.0
    while learner.exitcode is None:
        status = await witness.status()
        if status is None or not 0 < incarnation() < status.incarnation:
            alone_s += POLL_S
        else:
            replaced_s += POLL_S
        if status is not None and incarnation() == status.incarnation:
            replaced_s = 0.0  # the later claim is lost, or the learner has claimed the run after it
        if replaced_s > within_s:
            return "unfenced"
        if alone_s > within_s:
            return "unreplaced"
        await asyncio.sleep(POLL_S)
    return "left"

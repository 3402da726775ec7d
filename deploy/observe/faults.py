"""The workers that were set aside, in sentences for logs and terminals."""

from collections.abc import Iterator

from headway.broker.schema.status import Fault, RunStatus

MEANINGS = {
    "version": "is of another version of Headway",
    "stalled": "was set aside, as its engine hangs",
    "failing": "was set aside, as its engine fails again and again",
    "weights": "was set aside, as its engine does not hold the published weights",
    "silent": "was set aside, as it does not answer",
    "slow": "was set aside, as it is slow",
}
"""The rules' sentences on a worker, by the names of the rules."""


class FaultNews:
    """Remembers which faults a reader was told."""

    def __init__(self) -> None:
        self._told: tuple[Fault, ...] = ()

    def news(self, status: RunStatus) -> Iterator[str]:
        """Yields a sentence for each fault that the last look did not have."""
        told, self._told = self._told, status.faults
        yield from (fault_text(fault) for fault in status.faults if fault not in told)


def fault_text(fault: Fault) -> str:
    """Returns who was set aside, and why."""
    meaning = MEANINGS.get(fault.rule, "was set aside")
    return f"Worker {fault.worker} on host {fault.host} {meaning}: {fault.reason}"

"""The reasons why the learner has no batch yet; each tells its loop what to do before it asks again."""

from enum import StrEnum


class Wait(StrEnum):
    """The event that the batch waits for. Rank 0 sends the value to the other ranks."""

    FOR_WEIGHTS = "weights"
    """Workers cannot generate the batch before this step's weights are published. Where earlier steps were to be
    replayed, their batches are lost: what follows is a branch of its own."""
    FOR_COMMIT = "commit"
    """The broker's store is full with what was trained: a durable checkpoint lets it be freed."""
    FOR_DEVICE = "device"
    """Engines need the device that they share with the learner."""
    FOR_RANKS = "ranks"
    """The other ranks have waited long: they must hear that rank 0 lives."""

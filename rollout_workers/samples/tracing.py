"""The seam for a tracer of samples: a worker tells it when each phase of a sample begins, and how it ended."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import Lease, Trajectory

from .recorder import Recorder


class SampleTrace(Protocol):
    """Follows one sample while this worker holds its lease. No call waits or raises."""

    def generating(self) -> AbstractContextManager[object]:
        """A turn begins, and its tokens are sampled while the block lasts."""
        ...

    def scoring(self) -> AbstractContextManager[object]:
        """The turn is scored and answered while the block lasts, and then it ends."""
        ...

    def submitted(self, trajectory: Trajectory, outcome: SubmitOutcome) -> None:
        """The sample is whole, and the broker has answered its submission."""
        ...


class SampleTracer(Protocol):
    """Makes traces of samples."""

    def sample(self, lease: Lease, recorder: Recorder) -> AbstractContextManager[SampleTrace]:
        """Traces a sample until the block ends; if its submission was not told by then, the worker gave it up or lost
        it. `recorder` is the one that the sample's tokens go to."""
        ...


class NoTracer:
    """A tracer that records nothing."""

    def sample(self, lease: Lease, recorder: Recorder) -> AbstractContextManager[SampleTrace]:
        """Returns itself: it remembers nothing of a sample."""
        return nullcontext(self)

    def generating(self) -> AbstractContextManager[object]:
        """Returns a context manager that does nothing."""
        return nullcontext()

    def scoring(self) -> AbstractContextManager[object]:
        """Returns a context manager that does nothing."""
        return nullcontext()

    def submitted(self, trajectory: Trajectory, outcome: SubmitOutcome) -> None:
        """Does nothing."""


NO_TRACER = NoTracer()

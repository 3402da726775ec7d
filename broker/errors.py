"""Errors whose messages carry the numbers and the remedy.

Everything that Headway raises for the world's faults (bad input, dead servers, full disks) is a HeadwayError;
the command line prints its message as one paragraph. Our own bugs are assertions.
"""

LASTING_EXIT = 78
"""Exit code of a process whose error is there again if it is started again."""


class HeadwayError(Exception):
    """Base of all errors that a user can mend. `str(error)` is one clear paragraph with the remedy."""

    exit_code = 1
    """The exit code of a process that ends with this error."""


class ConfigError(HeadwayError):
    """A recipe or an override is wrong; the message names the path."""


class UntrainableBatchError(HeadwayError):
    """A step failed on a batch that its checks had let pass; the message says how to go on without it. The cause has
    the traceback."""


class BrokerError(HeadwayError):
    """The broker cannot do what was asked."""


class BrokerUnavailableError(BrokerError):
    """The server did not answer within the deadline."""


class RunNotFoundError(BrokerError):
    """No such run on this server; the message lists those that there are."""


class FencedError(BrokerError):
    """Another process has taken this role over; this one must stop."""


class ForeignRunError(FencedError):
    """Another run has the name by now: this process leaves everything of its own run behind, and joins anew."""


class QuarantinedError(BrokerError):
    """Too many samples of this worker were refused: it gets no more leases and must stop."""


class ServerRestartedError(BrokerError):
    """The server is not the one that this client knew: re-assert what it must not forget, then go on."""


class VersionRegressionError(BrokerError):
    """A process tried to publish or load weights older than those already announced."""


class FrameError(HeadwayError):
    """Bytes that are no valid frame: corrupt, truncated, oversized, or of another schema version."""


class DamagedFrameError(FrameError):
    """Bytes that are not what was sent: a disk, a memory or a network may have changed them, and no worker is to
    blame."""


class SchemaMismatchError(FrameError):
    """A whole frame of another schema version: two versions of Headway in one run."""


class UserCodeError(HeadwayError):
    """A function of the user's own raised, ran past its deadline or ended its process."""

    exit_code = LASTING_EXIT


class WeightSyncError(HeadwayError):
    """A transfer failed or an engine does not hold what it should; the engine keeps its old version."""


class NoRoomError(WeightSyncError):
    """No memory for a version at the moment. Nothing was touched, and trying again may do."""

"""Errors whose messages carry the numbers and the remedy.

Every error that Headway raises for faults of its surroundings (bad input, dead servers, full disks) is a HeadwayError;
the command line prints its message as one paragraph. Headway's own bugs are assertions.
"""

BUG_EXIT = 70
"""Exit code of a process that ends with an error that is none of Headway's: a bug of ours, or of a library."""

LASTING_EXIT = 78
"""Exit code of a process whose error would come again if it were started again."""

VERSION_EXIT = 79
"""Exit code of a process of another version than the run's learner. It would fail again if it were started again, but
other processes may be of the right version."""

UNHEALTHY_EXIT = 80
"""Exit code of a worker that has found itself unfit to generate. Another process in its place may be fit."""

SIGNALLED_EXIT = 81
"""Exit code of a worker that has handed its work back since a signal asked it to. Who sent the signal knows whether
another process is to take its place."""


class HeadwayError(Exception):
    """Base of all errors that a user can correct. `str(error)` is one clear paragraph with the remedy."""

    exit_code = 1
    """The exit code of a process that ends with this error."""


class ConfigError(HeadwayError):
    """A recipe or an override is wrong; the message names the path."""


class UnknownKeysError(ConfigError):
    """A recipe has several unknown keys; below the first line, the message has a line for each, or for some alike."""


class UntrainableBatchError(HeadwayError):
    """A step failed on a batch that had passed all checks. The message says how to go on without it; the cause has the
    traceback."""


class BrokerError(HeadwayError):
    """The broker cannot carry out a request."""


class BrokerUnavailableError(BrokerError):
    """The server did not answer within the deadline."""


class RefusedByServerError(BrokerUnavailableError):
    """The server refuses our user or password, or we its certificate. Trying again in this process cannot help."""

    exit_code = LASTING_EXIT  # but 1 where the password is a file's, which another start would read anew


class RunNotFoundError(BrokerError):
    """There is no such run on this server; the message lists its runs."""


class FencedError(BrokerError):
    """Another process has taken over the role of this one, which must stop."""


class ForeignRunError(FencedError):
    """Another run has the name now: this process must drop all that belongs to its own run, and join anew."""


class QuarantinedError(BrokerError):
    """Too many samples of this worker were refused: the worker gets no more leases and must stop."""


class ServerRestartedError(BrokerError):
    """The server is another process than this client knew: the learner must re-assert its state, and may then go on."""


class VersionRegressionError(BrokerError):
    """A process tried to publish or load weights older than those already announced."""


class FrameError(HeadwayError):
    """The bytes are no valid frame: corrupt, truncated, oversized, or of another schema version."""


class DamagedFrameError(FrameError):
    """The bytes are not those that were sent: a disk, memory or network may have changed them, so no worker is
    blamed."""


class SchemaMismatchError(FrameError):
    """Two versions of Headway work on one run: an intact frame has another schema version, or the server has another
    version's functions."""

    exit_code = VERSION_EXIT


class UserCodeError(HeadwayError):
    """A function of the user's own raised, ran past its deadline or ended its process."""

    exit_code = LASTING_EXIT


class CallDeadlineError(UserCodeError):
    """A call of the user's own code, or of a server that it uses, ran past its deadline. What it ran in lives."""


class WeightSyncError(HeadwayError):
    """A transfer failed, or an engine does not hold the weights that it should; the engine keeps its old version."""


class ForeignWeightsError(WeightSyncError):
    """The published weights are of another architecture than the engine's, or have names that it does not know."""

    exit_code = LASTING_EXIT


class NoRoomError(WeightSyncError):
    """There is no memory for a version at the moment. Nothing was changed, and trying again may help."""


class UnhealthyWorkerError(HeadwayError):
    """A worker has found itself unfit to generate: its engine hangs, fails or does not hold what was published."""

    exit_code = UNHEALTHY_EXIT

"""Translates the refusals of scripts and servers into Headway's errors."""

import ssl

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
    TryAgainError,
)

from headway.broker.errors import (
    BrokerError,
    BrokerUnavailableError,
    FencedError,
    ForeignRunError,
    HeadwayError,
    RefusedByServerError,
    ServerRestartedError,
    VersionRegressionError,
)

from .address import PASSWORD_FILE, PASSWORD_FILE_OPTION

_PASSING = ("MISCONF", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS", "MOVED", "ASK", "BUSY")
"""Refusals that end once the server is repaired: a full disk, a failover."""

_NOT_ALLOWED_INSIDE = ("ACL failure in script", "The user executing the script can't")
"""The beginnings of the error for a function that did something that its caller may not do; Redis 7.0 has the
second."""
_MOVED_KEY = "access a non local key"


def translated(error: ResponseError, *, run: str, url: str, server_id: str) -> BrokerError:
    """Returns the error to raise; `server_id` is the server on which the learner claimed the run."""
    word, _, rest = str(error).partition(" ")
    match word:
        case "FENCED":
            return FencedError(
                f"Another learner has taken run {run} over (incarnation {rest}), "
                "or the run was deleted: this one must stop."
            )
        case "ARGUMENT":
            what = rest.partition(" script: ")[0]
            return BrokerError(
                f"The server at {url} does not take what this process says of run {run} ({what}): it is out of bounds."
            )
        case "FOREIGN":
            return foreign(run, url, rest)
        case "RESTARTED":
            return ServerRestartedError(
                f"The server at {url} is no longer {server_id} but {rest}: "
                "it restarted and may have lost its last second. Re-assert before going on."
            )
        case "REGRESSION":
            held = rest.split()
            return VersionRegressionError(
                f"Run {run} has announced version ({held[0]}, {held[1]}) and been offered "
                f"({held[2]}, {held[3]}); only newer weights of the run's owner can follow."
            )
        case "ADVANCED":
            return BrokerError(
                f"Run {run} is already at step {rest}: resume it with --resume, where its checkpoints are, "
                "choose another run.name, or start anew with --overwrite."
            )
        case "FULL":
            stored, cap = rest.split()
            return BrokerError(
                f"Run {run} has stored {stored} bytes of samples and archived weights, and one step needs more than "
                f"broker.max_bytes={cap}: raise it, lower learner.groups_per_step, learner.group_size or "
                "sampling.max_new_tokens, or take weights.archive out of the broker."
            )
    return _refused_by_server(error, url)


def foreign(run: str, url: str, identity: str) -> ForeignRunError:
    """Returns the error for a client of the run that had the name before."""
    return ForeignRunError(
        f"Run {run} at {url} is another run by now (identity {identity}): the one before was deleted or overwritten,"
        " and begun anew under its name. What belongs to that one is of no use to the new one."
    )


def _refused_by_server(error: ResponseError, url: str) -> BrokerError:
    word = str(error).partition(" ")[0]
    code = error.status_code or word
    if code in _PASSING:
        words = str(error) if code == word else f"{code} {error}"
        return BrokerUnavailableError(
            f"The server at {url} takes no commands now: {words} "
            "Once it is mended (a full disk? a failover?), learner and workers go on by themselves."
        )
    if isinstance(error, OutOfMemoryError):
        return BrokerUnavailableError(
            f"The server at {url} is out of memory ({error}): raise its maxmemory, or lower broker.max_bytes. "
            "Learner and workers go on by themselves then."
        )
    if isinstance(error, NoPermissionError) or any(words in str(error) for words in _NOT_ALLOWED_INSIDE):
        return BrokerError(
            f"Our user at {url} may not do this ({error}). If it is another role's, take the URL that `headway broker`"
            " prints for this command's role; what changes a run needs the learner's. If it is the right one: each"
            " version of Headway needs rights of its own. Run `headway acl` of this version (with --redis-7.0 for Redis"
            " 7.0), and give the server what it prints. An embedded server of an earlier version: stop it and start it"
            " again."
        )
    return BrokerError(f"The server at {url} refused a command: {error}")


def unavailable(error: Exception, *, url: str, timeout_s: float, has_password_file: bool) -> BrokerUnavailableError:
    """Returns the error for a server that has not answered within `timeout_s`, or a RefusedByServerError.
    `has_password_file`: whether our password is a file's."""
    reason = str(error) or type(error).__name__
    if _is_caused_by(error, ssl.SSLCertVerificationError):
        return RefusedByServerError(
            f"The broker at {url} shows a certificate that is not to be trusted ({reason}): name its "
            "authority's certificate in broker.url as ?ssl_ca_certs=FILE, and the host as the certificate has it."
        )
    if _is_caused_by(error, AuthenticationError):
        refused = RefusedByServerError(
            f"The broker at {url} refuses our user or password ({reason}): take the URL that its "
            "`headway broker` prints for our role, or put the user into the URL (redis://USER@HOST) and name a "
            f"file with the password: ?{PASSWORD_FILE_OPTION}=FILE there, or ${PASSWORD_FILE}."
        )
        if has_password_file:  # each start reads it anew, so one helps once the file has the server's new password
            refused.exit_code = HeadwayError.exit_code
        return refused
    return BrokerUnavailableError(
        f"No answer from the broker at {url} within {timeout_s:g} s ({reason}). "
        "Is it running? Start one with `headway broker`, or set broker.url."
    )


def is_lasting(error: BaseException) -> bool:
    """Returns whether trying again cannot help: a password or the server's certificate is refused."""
    return _is_caused_by(error, (AuthenticationError, ssl.SSLCertVerificationError))


def ends_by_itself(error: ResponseError) -> bool:
    """Returns whether the refusal ends by itself: the cluster moves slots or elects a primary."""
    is_moving = isinstance(error, (AskError, TryAgainError, ClusterDownError)) or _MOVED_KEY in str(error)
    return is_moving and not isinstance(error, MasterDownError)


def _is_caused_by(error: BaseException | None, kinds: type[Exception] | tuple[type[Exception], ...]) -> bool:
    """Returns whether the error or one of its causes is of these kinds: the driver wraps refusals as lost
    connections."""
    return isinstance(error, kinds) or (error is not None and _is_caused_by(error.__context__, kinds))

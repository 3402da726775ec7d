"""What can go wrong with a request, as an HTTP status and a kind that is counted."""

import logging

import msgspec

from headway.broker.errors import HeadwayError
from headway.rollout_workers.agents.calls import CallRefusedError, SessionAwayError, SessionEndedError

logger = logging.getLogger(__name__)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request gets no answer."""

    status: int
    kind: str
    """Under which it is counted."""
    message: str
    field: str = ""
    """The field of the request that is at fault, if it is one."""
    retry_after_s: int = 0
    """When the client should try again; 0: it is not told."""


class ProblemError(HeadwayError):
    """A request gets no answer, for a reason that the endpoint itself has found."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: BaseException) -> Problem:
    """Return what the client is told of an error. What is neither the client's fault nor a known state of the endpoint
    is logged here, and the client learns nothing of it."""
    match error:
        case ProblemError():
            return error.problem
        case CallRefusedError():
            return Problem(status=400, kind="refused", message=str(error), field=error.field)
        case SessionEndedError():
            return Problem(status=410, kind="ended", message=str(error) or "this episode has ended")
        case SessionAwayError():
            return Problem(status=503, kind="away", message=str(error), retry_after_s=2)
    logger.error("a call of an agent failed", exc_info=error)
    return Problem(status=500, kind="failed", message="the call failed inside the worker, whose log says why")


def unreadable(message: str) -> ProblemError:
    """Return the error for a body that is no request at all."""
    return ProblemError(Problem(status=400, kind="unreadable", message=message))


def overloaded(message: str) -> ProblemError:
    """Return the error for a request for which the endpoint has no room now."""
    return ProblemError(Problem(status=503, kind="overloaded", message=message, retry_after_s=2))

"""Sums up what became of a worker's episodes, for its report and for the measures of each episode."""

from collections import Counter
from collections.abc import Collection, Mapping

from headway.broker.schema.agent_measures import FAILED, PREFIX, REFUSED
from headway.broker.schema.status import AgentInfo

from .session import EpisodeSession
from .tree import EpisodeRecorder


class EpisodeTally:
    """Counts episodes as they leave the worker. `report` may be called by any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._finished = self._finished_turns = 0
        self._tool_s = 0.0

    def note_left(self, session: EpisodeSession) -> None:
        """Note an episode that has left the worker, however it did."""
        self._counts.update(session.counts)
        self._tool_s += session.waited_s

    def note_finished(self, recorder: EpisodeRecorder) -> None:
        """Note an episode that was played to its end."""
        self._finished += 1
        self._finished_turns += len(recorder.turns)

    def note_failed(self, reason: str) -> None:
        """Note an episode whose agent failed."""
        self._failures[reason] += 1

    def report(self, sessions: Collection[EpisodeSession], refused: Mapping[str, int]) -> AgentInfo:
        """Return the worker's report. `sessions` are open; `refused` are requests that got an error, by reason."""
        counts = self._counts
        return AgentInfo(
            episodes=len(sessions),
            running_requests=sum(session.running_requests for session in sessions),
            waiting_for_tools=sum(session.waits_for_tools for session in sessions),
            finished=self._finished,
            finished_turns=self._finished_turns,
            turns=counts["turns"],
            tool_s=self._tool_s,
            read_tokens=counts["read_tokens"],
            sampled_tokens=counts["sampled_tokens"],
            forks=counts["forks"],
            reread_tokens=counts["reread_tokens"],
            unseen_turns=counts["unseen_turns"],
            resumed_calls=counts["resumed"],
            repeated_calls=counts["repeated"],
            lost_calls=counts["lost_calls"],
            restarted=counts["restarted"],
            over_budget=counts["over_budget"],
            turn_timeouts=counts["turn_timeouts"],
            failures=dict(self._failures),
            refused_calls=dict(refused),
        )


def measures_of(
    session: EpisodeSession, recorder: EpisodeRecorder, failure: str, refused: Mapping[str, int]
) -> dict[str, float]:
    """Return the measures of one episode, as `broker.schema.agent_measures` names them. `failure`: the reason for which
    it gets 0; "": it has not failed."""
    found = {name: float(count) for name, count in session.counts.items() if count}
    found |= {"turns": float(len(recorder.turns)), "tool_s": session.waited_s}
    found |= {"versions": float(len({span.version for span in recorder.spans})), FAILED: float(bool(failure))}
    found |= {f"{FAILED}/{failure}": 1.0} if failure else {}
    found |= {f"{REFUSED}/{reason}": float(count) for reason, count in refused.items()}
    return {f"{PREFIX}{name}": value for name, value in found.items()}

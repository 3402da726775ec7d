"""A learner's spans: step -> checkpoint, evaluate, take, pack, train, publish, with links to what it trained."""

from opentelemetry.trace import Link

from headway.broker.schema import TrajectoryId
from headway.learner.stages.loop import TrainedStep

from .ids import TRAJECTORY, ids_of_step, ids_of_trajectory
from .provider import Spans


class TracedSteps:
    """Makes the spans of a run's steps, each once it is done; `identity` is the run's."""

    def __init__(self, spans: Spans, identity: str) -> None:
        self._spans = spans
        self._identity = identity

    def add(self, step: TrainedStep) -> None:
        """Make the spans of a step from its laps."""
        tids = [trajectory.tid for trajectory in step.scored.trajectories]
        root = self._spans.start_root(
            "step",
            ids_of_step(self._identity, step.version),
            {
                "headway.step": step.version.step,
                "headway.incarnation": step.version.incarnation,
                "headway.trajectories": len(tids),
            },
            links=[self.link(tid) for tid in tids],
            start_ns=_ns(step.laps[0].start_s),
        )
        for lap in step.laps:
            self._spans.start(lap.phase, root, {}, start_ns=_ns(lap.start_s)).end(_ns(lap.end_s))
        root.end(_ns(step.laps[-1].end_s))

    def link(self, tid: TrajectoryId) -> Link:
        """Return the link to a trajectory's root span."""
        return self._spans.link_to(TRAJECTORY, ids_of_trajectory(self._identity, tid), {"headway.trajectory": str(tid)})


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""What ends the learner's wait for a batch, or for the broker, before it comes."""


class Interrupted(Exception):  # noqa: N818 - no error: the loop ends in order
    """The learner was asked to stop while it waited."""


class NeedsLearner(Exception):  # noqa: N818 - no error: the loop goes on from here
    """The loop must act before waiting on.

    `rewind`: publish this step's weights; `bytes`: commit what was trained; `time`: let the other ranks see that this
    one lives; `engines`: leave them the device that they share with the learner.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

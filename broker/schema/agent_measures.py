"""The measures that a worker takes of an agent's episode, as a trajectory's `rewards` name them. An agent's own
measures stand beside them, under other names."""

PREFIX = "agent/"
"""The start of the names of all measures of an episode."""
FAILED, REFUSED = "failed", "refused"
"""1 for a failed episode, also as `failed/REASON`; and `refused/REASON`, the requests that got an error."""
MEASURES = frozenset(
    {
        "turns",
        "auxiliary_turns",
        "unseen_turns",
        "forks",
        "unbridged",
        "read_tokens",
        "sampled_tokens",
        "reread_tokens",
        "resumed",
        "restarted",
        "repeated",
        "lost_calls",
        "over_budget",
        "turn_timeouts",
        "replaced_temperature",
        "tool_s",
        "versions",
        FAILED,
        REFUSED,
    }
)
"""Names that an agent's own measures cannot have, nor begin with before a slash."""


def is_reserved(name: str) -> bool:
    """Return whether a measure of that name, without PREFIX, is the worker's own."""
    return name.partition("/")[0] in MEASURES


def is_worker_measure(component: str) -> bool:
    """Return whether a trajectory's component is a measure that the worker took of the episode."""
    return component.startswith(PREFIX) and is_reserved(component.removeprefix(PREFIX))

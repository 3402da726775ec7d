"""The usual rate of each fault."""

MEAN_S = {
    "kill worker": 4.0,
    "kill learner": 11.0,
    "kill server": 30.0,
    "blackout": 40.0,
    "power loss": 14.0,
    "kill scorer": 12.0,
    "stop worker": 16.0,
    "stop learner": 40.0,
    "revive learner": 25.0,
    "stop server": 40.0,
    "cut link": 8.0,
    "fill memory": 45.0,
    "damage blob": 6.0,
    "send pill": 2.5,
    "hoard leases": 25.0,
    "ask junk": 8.0,
    "wake leftover": 15.0,
    "flood": 20.0,
    "fill disk": 25.0,
}
"""The mean seconds between two faults of a kind, exponentially distributed."""

"""A learner runs one stage from its beginning to its end: reinforcement learning, the warm-up, or a replay."""

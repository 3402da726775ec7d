"""What a learner does from beginning to end: reinforcement learning, the warm-up, a replay."""

"""What lies on the disk: checkpoints, their digests, and which of them a resumed learner loads."""

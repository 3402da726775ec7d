"""The learner writes checkpoints and their digests, and a resumed one loads the newest that is whole."""

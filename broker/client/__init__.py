"""The verbs, one file for each kind: what learner, workers and observers do with a run."""

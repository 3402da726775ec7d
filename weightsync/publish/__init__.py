"""The learner's side: a version offered, gathered, broadcast to the current group, announced."""

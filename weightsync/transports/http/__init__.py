"""Pulls: the learner serves its versions over HTTPS, and workers fetch the versions that they missed."""

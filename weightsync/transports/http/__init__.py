"""Pulls: the learner serves its versions over HTTPS, workers fetch what they missed."""

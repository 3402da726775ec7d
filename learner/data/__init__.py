"""Prompts for the workers, and the examples, preferences and labelled completions of the learner's other stages."""

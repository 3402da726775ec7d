"""The learner reads prompts for the workers, and worked examples for supervised training."""

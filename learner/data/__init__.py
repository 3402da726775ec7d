"""What the learner trains on: prompts for the workers, and worked examples for the warm-up."""

"""One update of the policy: the composed objective, the critic, shaped rewards, and the optimizer steps."""

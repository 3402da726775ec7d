"""One update: the composed objective, the critic, shaped rewards, and what applies them."""

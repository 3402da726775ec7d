"""A comparison of Headway's losses with verl's and TRL's, whose own code runs in an environment of its own.

    make peer-losses        (or, there: python -m benchmarks.peer_losses)

One random float64 batch of ragged responses with masked places inside goes through both. Losses are compared by value
and by gradient of each token, anything else by all its numbers. Progress goes to stderr; the last line is one JSON
object: for each setting the largest difference over the largest number, and whether all are within 1e-8, the error of
verl's own denominators (1e-6 for ORPO, parts of which TRL computes in float32).

    sample.py       the batch, packed and padded
    ours.py         a composition of the learner's, or a function of `algorithms`
    of_verl.py      verl's functions, called as its trainer calls them
    of_trl.py       TRL's GRPO, RLOO and divergences from a teacher
    of_trl_preferences.py   TRL's losses of pairs, of single judgements and of reward models
"""

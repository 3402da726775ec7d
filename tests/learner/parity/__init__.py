"""A comparison of both backends with plain transformers, for every layout of the model over processes.

    cases.py      a case: backend, model, layout, recompute    layouts.py   all layouts, and few that cover their pairs
    models.py     the models, as Hugging Face directories      data.py      ragged sequences, the same for all cases
    reference.py  the same steps by transformers and torch     baseline.py  the expected values, and the tolerances
    launch.py     torchrun; reports of failures and hangs      rank.py      one rank under it, job after job
    outcome.py    outcomes, and the distance between two       moments.py   AdamW's moments out of a checkpoint
    finding.py    the finding on a case                        comparison.py  runs cases and keeps their findings

Every case starts from Hugging Face files, exports them again, takes two steps, and resumes after the first of them from
another layout's checkpoint. The reference sees one sequence at a time, never a packed row, and runs none of the
learner's code. `make parity` runs all cases, the test suite runs those in which every pair of dimensions meets.
"""

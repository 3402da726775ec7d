"""Do both backends compute what plain transformers computes, however the model is laid out over processes?

    cases.py      a case: backend, model, layout, recompute    layouts.py   all layouts, and few that cover their pairs
    models.py     the models, as Hugging Face directories      data.py      ragged sequences, the same for everybody
    reference.py  the same steps by transformers and torch     baseline.py  what is expected, and the tolerances
    launch.py     torchrun; what failed or hung is reported    rank.py      one rank under it, job after job
    outcome.py    what came out, and how far two lie apart     moments.py   AdamW's moments out of a checkpoint
    finding.py    what is said of a case                       comparison.py  runs cases and keeps their findings

Every case starts from Hugging Face files, exports them again, takes two steps, and resumes after the first of them from
what another layout saved. The reference sees one sequence at a time, never a packed row, and runs none of the learner's
code. `make parity` runs all cases, the test suite those in which every pair of dimensions meets.
"""

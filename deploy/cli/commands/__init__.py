"""The commands, in a file for each group.

    run.py     run                       roles.py   broker, learner, workers, scorers, train, eval, replay
    runs.py    status, top, scale, runs  models.py  export, generate, chat
    pages.py   report, compare, dashboard
    tools.py   acl, algorithms, plan-memory, metrics, doctor
    data.py    data                      launch.py, ray.py   launch, ray          new.py   new
    options.py, dry_run.py               what several of them share

The invariant: each command parses its arguments first and imports what it needs afterwards.
"""

"""The only room that sees all others: it composes configuration, starts processes, shows what they do.

    recipe.yaml + a.b=c ──config.py──► Recipe ──cli.py──► alone.py   one role: headway learner, workers, ...
                                                     └──► local.py   all roles on one machine: headway run

    run_directory.py  a run's place on disk         supervisor.py  keeps processes alive or stops them all
    processes.py      one role as a child process   tether.py      a child never outlives its parent
    live.py           progress while it runs        status.py      one look at a run
    report.py         metrics, lineage, summary     plots.py       reward and lag as a picture
    training.py       the learner's process         rollout.py     a worker's process
    warm_up.py        the supervised stage          evaluation.py  pass rate on held-out prompts
    observer.py       what the loop reports         doctor.py      what works on this machine
    server.py         headway broker                runs.py        headway runs: list, show, delete
    replay.py         headway replay                comparison.py  a replay beside its original
    acl.py            headway acl                   algorithm_pages.py  headway algorithms
    memory_pages.py   headway plan-memory           recipes/       the YAML files that ship
    ending.py         how each of these processes ends

Invariant: roles share nothing but the broker. Only the learner's process writes into the run's directory
while the run lasts, and no worker ever reads from it.
"""

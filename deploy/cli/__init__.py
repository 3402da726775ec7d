"""The command line, and what its commands print.

    main.py     the group of all commands, their errors and exit codes
    run.py      run, ray, launch    roles.py   broker, learner, workers, scorers, train, eval, replay
    runs.py     status, top, scale, drain, quarantine, autoscale, runs
    models.py   export, generate, chat         pages.py   report, compare, dashboard
    data.py     data         trajectories.py   trajectories
    tools.py    acl, algorithms, plan-memory, metrics, doctor, new
    options.py  options that several commands share

    what imports large packages, and only once a command runs:
    algorithm_tables.py, data_report.py, memory_report.py, doctor.py, top.py

The invariant: a command parses its arguments before it imports a large package, so `--help` and a wrong option answer
at once. It ends with one paragraph and an exit code, never with a traceback for what a user can mend.
"""

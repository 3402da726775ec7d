"""The work of each process: what it opens, in which order, and how it ends.

    alone.py    each role in its own terminal, around:
                server.py    learner.py    stage.py    worker.py    scorer.py    autoscaler.py, served_autoscaler.py
    joining.py  a worker or scorer waits for the run's configuration, and notices when it changes

    learner.py ─┬─ backend.py, engine.py          what a recipe asks for
                ├─ evaluation.py, worker_evaluations.py
                └─ observer.py                    what the loop reports ─► sinks, live figures
    worker.py ─┬── ahead.py                       an engine that opens while the learner loads
               ├── closing.py                     parts are closed, and their errors of closing are logged
               └── asked.py                       ─► scorers

    with a trained model   export.py, adapter_export.py, export_check.py, chat.py, generating.py, generating_pool.py,
                           generating_workers.py, replay.py
    from outside           looking.py;  stop_request.py: SIGTERM and Ctrl-C as a flag

The invariant: a role closes what it opened, in the opposite order, however it ends; its exit code says whether another
try may help.
"""

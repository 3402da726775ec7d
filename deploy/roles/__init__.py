"""The work of each process: what it opens, in which order, and how it ends.

    standalone.py    each role in its own terminal, around:
                     learner.py    workerless_stage.py    worker.py    scorer.py    autoscaler.py
    config_watch.py  a worker or scorer waits for the run's configuration, and notices when it changes

    learner.py ─┬─ recipe_backends.py             what a recipe asks for
                ├─ held_out_evaluation.py         in the learner's process, or by the workers
                └─ observer.py                    what the loop reports ─► sinks, live figures
    worker.py ─┬── prewarmed_engine.py            an engine that opens while the learner loads
               └── scorer.py                      clients of scorers

    with a trained model   trained_model.py, export.py, chat.py, batch_inference.py, batch_inference_workers.py,
                           replay.py
    from outside           run_client.py;  stop_request.py: SIGTERM and Ctrl-C as a flag

The invariant: a role closes what it opened, in the opposite order, however it ends; its exit code says whether another
try may help.
"""

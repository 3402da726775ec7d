"""Starts a run's processes in order, and watches, restarts and stops them.

    local_run.py ──► commands.py   the exact command of each role, with its environment and resources
                 ──► supervisor.py ──Command──► base.Launcher ──► base.Handle
                 ──► process_pool.py, pool_reports.py   pools of processes; their reports to the broker

    base.py              the seam; `--dry-run`: shows commands, starts none
    local_launcher.py    `local`: child processes of this one; parent_watch.py ends each with its parent
    ray_launcher.py      `ray`: processes on the nodes of a Ray cluster, each under an actor
    slurm_scripts.py, kubernetes_manifests.py   write what a cluster's own scheduler starts
    broker_server.py     the run's server, a child of this process
    engine_preload.py    imports what a worker's engine needs, before the worker imports anything else

The invariant: a run starts processes only through its launcher, so that `--dry-run` shows what a run starts. Only the
recipe that the user gives to `headway run` chooses the launcher, never a configuration from the broker.
"""

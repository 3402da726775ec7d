"""Starts a run's processes in order, and watches, restarts and stops them.

    local.py ──► commands.py   the exact command of each role, with its environment and resources
             ──► supervisor.py ──Command──► base.Launcher ──► base.Handle

    processes.py   `local`: child processes of this one     printed.py   `--dry-run`: shows commands, starts none
    on_ray.py      `ray`: processes on the nodes of a Ray cluster, each under an actor (ray_host.py),
                   where ray_places.py says
    slurm.py, kubernetes.py   write what a cluster's own scheduler starts
    opening.py     opens the launcher that a recipe names
    kept_server.py the run's server, a child of this process     tether.py, farewell.py   how a child ends
    preloading.py  what a worker's engine waits for, begun before the worker imports anything else

The invariant: a run starts processes only through its launcher, so that `--dry-run` shows what a run starts. Only the
recipe that the user gives to `headway run` chooses the launcher, never a configuration from the broker.
"""

"""Processes: what a run starts, in which order, and how they are watched, restarted and stopped.

    local.py ──► commands.py   the exact command of each role, with its environment and resources
             ──► supervisor.py ──Command──► base.Launcher ──► base.Handle

    processes.py   `local`: child processes of this one     printed.py   `--dry-run`: shows them, starts none
    opening.py     which of them a recipe names
    kept_server.py the run's server, in our own process     tether.py, farewell.py   how a child ends

Invariant: a run starts nothing but through its launcher, so that what `--dry-run` shows is what a run starts. Only the
recipe that the user gives to `headway run` chooses the launcher, never a configuration from the broker.
"""

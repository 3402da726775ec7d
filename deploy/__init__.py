"""The only room that sees all others: it composes configuration, starts processes, shows what they do.

    recipe.yaml + a.b=c ──recipe/──► Recipe ──cli/──► roles/    one role: headway learner, workers, ...
                                                └───► launch/   all roles on one machine: headway run

    cli/        the commands, and what they print
    recipe/     what a user asks for: YAML and overrides, checked before anything starts
    recipes/    the YAML files that ship
    roles/      what each process opens, in which order, and how it ends
    launch/     processes on one machine: started, watched, restarted, stopped
    run/        a run's directory: what lies in it, who uses it, what a resumed run may change
    observe/    a run as it is now: headway status, the live panel
    printing.py, terminal.py   the only ways to a log and to a terminal

Invariant: roles share nothing but the broker. Only the learner's process writes into the run's directory
while the run lasts, and no worker ever reads from it.
"""

"""The only room that imports all others: it composes configuration, starts processes and shows what they do.

    recipe.yaml + a.b=c ──recipe/──► Recipe ──cli/──► roles/    one role: headway learner, workers, ...
                                                └───► launch/   all roles on one machine: headway run

    cli/        the commands, and what they print
    recipe/     the user's configuration: YAML and overrides, checked before anything starts
    recipes/    the YAML files that ship, by name (`headway run arithmetic.yaml`); recipes/gpu/: those that need GPUs
    slurm/      the bodies of batch scripts that ship; kubernetes/: the manifests
    flow/       the interface of a user's own training flow, and an example of all of it
    roles/      the work of each process: what it opens, in which order, and how it ends
    launch/     processes on one machine: started, watched, restarted, stopped
    run/        a run's directory: its files, the process that uses it, what a resumed run may change
    observe/    a run as others see it: headway status, live panel, metric sinks, Prometheus, traces, pages
    printing.py, terminal.py   the only ways to a log and to a terminal

The invariant: roles share nothing but the broker. While a run lasts only the learner's process writes into its
directory, and no worker ever reads from it.
"""

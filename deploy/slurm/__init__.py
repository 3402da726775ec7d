"""The bodies of the batch scripts that `headway launch slurm` writes; `deploy/launch/slurm.py` puts a head before each.

    job.sh       in every script: a child process, how it is told to drain, and how the job is queued again
    broker.sh    serves, and writes its address into the launch directory
    learner.sh   prepares the run, runs the stages before the learner, then one task of the learner for each rank
    workers.sh   one element of a job array: one worker
    stop.sh      ends broker and workers once the learner's job has ended
    submit.sh    submits all of them, with their dependencies

The invariant: no script contains a password. Roles read them from the files below `server/passwords`, as they do when
`headway broker` serves.
"""

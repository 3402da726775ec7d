"""The code that stands against hostile workers: any program may hold a worker's password.

    sample_validation.py    refuses samples and segments that cannot be of this run, before the learner trains them
    garbage_collection.py   frees orphaned keys, with which a worker could keep the server's memory full

Elsewhere: the access control lists of users (`server/access.py`), the checks of frames (`wire/checks.py`), and on the
server the checks of a verb's arguments (`scripts/calls.lua`) and quarantine (`strike` in
`scripts/samples.lua`).

The invariant: whatever a worker's user sends, the learner trains no sample that breaks the run's rules.
"""

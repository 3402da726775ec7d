"""The verbs of a run, by who calls them: learner, workers, scorers, supervisors and observers.

    broker.py: Broker, BlockingBroker
       ├─ learner      learner.py (claim, prompts, batches), weights.py (versions, archive, rendezvous store)
       ├─ workers      leases.py, submissions.py
       ├─ both         engine_pauses.py (swap turns, phases of a colocated run), evaluations.py, scoring.py
       ├─ supervisors  supervision.py (pools, faults, the learner's heartbeat, users and bytes of a run)
       └─ observers    status.py (also what the next step waits for)

    broker.py: Outages repeats the calls of a process while the broker does not answer

The invariant: a verb may be repeated after a lost reply. Each is one script on the server (`broker/scripts/`), which
checks the lease's token or the learner's incarnation before it writes anything.
"""

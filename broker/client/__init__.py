"""The verbs, one file for each kind: what learner, workers, scorers and observers do with a run.

    broker.py: Broker, BlockingBroker
       ├─ learner    prompts.py, batches.py, versions.py, archive.py, strays.py, holding.py, phases.py, waits.py
       ├─ workers    leases.py, blobs.py, submissions.py, unconfirmed.py, turns.py, meetings.py
       ├─ both       evaluations.py, scoring.py
       └─ observers  status.py, pools.py, faults.py, usage.py

The invariant: a verb may be repeated after a lost reply. Each is one script on the server (`broker/scripts/`), which
checks the lease's token or the learner's incarnation before it writes anything.
"""

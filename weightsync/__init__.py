"""Versioned weights, from the learner to every engine; knows neither how they are trained nor what runs them.

    learner: publish(version, tensors)                      worker: wait_for_version(current)

      stage ──► offer ─────── broker ───────────────────────► notice
        │                                                        │ member of the offered epoch
        ├────── broadcast, through the epoch's process group ──► receive ─► verify ─► acknowledge
        │                                                        │                        │
        ├──◄─── acknowledgements, until the deadline ────────────┼────────────────────────┘
        └─────► announce ──── broker ────► everybody else: pull ─┴─► verify ──► Delivery ─► engine

    Behind a slow line (`follow: pull`) a worker is in no epoch: it keeps what it pulled, and deltas, encoded between
    broadcast and announcement, bring that up to date.

    heartbeats ─► membership: the next epoch's members (newcomers, and who missed a deadline, pull first)

Invariant: what is handed to an engine is exactly one complete version, verified tensor by tensor; versions never
regress; nobody waits for ever: every step above has a deadline, after which it goes on without whoever
missed it, who pulls.
"""

"""Versioned weights, from the learner to every engine. This room knows neither trainers nor engines.

    learner: begin(version, tensors)                        worker: wait_for_version(current)

      offer ──────────── broker, its bell ──────────────────► notice
        │                                                        │ member of the offered epoch
      gather k + 1 │ broadcast k, through the epoch's group ──► receive k + 1 │ fingerprint k
        │                                                        │
        ├────── all fingerprints ──────────────────────────────► verify ──────► acknowledge
        │                                                        │                  │
        ├──◄─── acknowledgements, until the deadline ────────────┼──────────────────┘
        └─────► announce ──── broker ────► other workers: pull ──┴─► verify ──► Delivery ─► engine

    The learner goes on once its tensors are gathered; a thread does the rest beside the next step.

    A worker behind a slow line (`follow: pull`) is in no epoch. It keeps the version that it pulled, and brings it up
    to date by deltas, which the learner encodes between broadcast and announcement.

    Where an engine's GPU has no room for a second version (`staging: none`), members receive in waves, one wave after
    the other, into the weights that they generate with. A member pauses from the first bucket until the whole version
    is verified:

      broadcast to wave 0 ──► pause, load bucket by bucket, verify ──► acknowledge: it generates again
      broadcast to wave 1 ──► ...                                      announce, after the last wave

    A worker whose transfer was cut off samples nothing until it has pulled a whole version, through host memory.

    Workers may pull from an archive besides the learner's memory (`archives/`): it holds a whole version from time to
    time, and the deltas that lead on from it. Versions, deltas and archives have the published precision: an engine
    that quantizes does so as it loads them.

    A swap turn is the right, which a worker takes from the broker, to swap weights while others generate
    (`broker/client/turns.py`). With `staging: none` the learner gives each wave its turn to receive instead.

    heartbeats ─► membership: the next epoch's members (newcomers, and workers that missed a deadline, pull first)

    publish/      the learner's side: a version offered, gathered, broadcast to the current group, announced
    receive/      a worker's side: one version after the other, received or pulled, verified, handed to the engine
    tensors/      a version as bytes: buckets, staging, fingerprints, deltas, memory in which versions arrive
    transports/   how bytes travel: broadcast to a group that formed through the broker, or pulled over HTTP
    archives/     where versions lie besides the learner's memory
    deadline.py, pace.py   how long an operation may take; how fast a worker may pull
    config.py     what users can choose

Invariant: an engine samples with exactly one complete version, verified tensor by tensor; versions never regress; no
process waits for ever: every step above has a deadline, after which the learner goes on without the workers that
missed it, and they pull.
"""

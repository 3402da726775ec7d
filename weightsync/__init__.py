"""Versioned weights, from the learner to every engine. This room knows neither trainers nor engines.

    learner: begin(version, tensors)                        worker: wait_for_version(current)

      offer ──────────── broker, notification ──────────────► notice
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
    (`broker/client/engine_pauses.py`). With `staging: none` the learner gives each wave its turn to receive instead.

    heartbeats ─► membership: the next epoch's members (newcomers, and workers that missed a deadline, pull first)

    publisher.py     the learner's side: a version is offered, gathered, broadcast to the current group, announced
    sender.py        an epoch's group: its members, formed, sent to; backoff where members cannot connect
    subscriber.py    a worker's side: one version after the other, received or pulled, verified; the inbox of its engine
    receiver.py      the epochs that name this worker, and a broadcast, in a thread
    puller.py        versions and deltas over HTTP or from an archive, in the background
    weights_from_files.py   what of the first version, or of the base of adapters, the model's own files hold
    deliveries.py    what the engine gets: a whole version, or one that still arrives (`staging: none`)
    tensors/         a version as bytes: buckets, staging, fingerprints, deltas, memory in which versions arrive
    transports/      how bytes travel: broadcast to a group that formed through the broker, or pulled over HTTP
    archives/        where versions lie besides the learner's memory
    limits.py        how long an operation may take; how fast a worker may pull
    config.py        what users can choose

A broadcast that fails costs its deadline, is told as a text, and leaves its workers to pull the version. Broadcasts and
pulls meet in the inbox, where a newer version takes the place of one that still waits.

Invariant: an engine samples with exactly one complete version, verified tensor by tensor; versions never regress; no
process waits for ever: every step above has a deadline, after which the learner goes on without the workers that
missed it, and they pull.
"""

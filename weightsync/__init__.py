"""Versioned weights, from the learner to every engine; knows neither how they are trained nor what runs them.

    learner: begin(version, tensors)                        worker: wait_for_version(current)

      offer ──────────── broker, its bell ──────────────────► notice
        │                                                        │ member of the offered epoch
      gather k + 1 │ broadcast k, through the epoch's group ──► receive k + 1 │ fingerprint k
        │                                                        │
        ├────── all fingerprints ──────────────────────────────► verify ──────► acknowledge
        │                                                        │                  │
        ├──◄─── acknowledgements, until the deadline ────────────┼──────────────────┘
        └─────► announce ──── broker ────► everybody else: pull ─┴─► verify ──► Delivery ─► engine

    The learner goes on once its tensors are gathered; the rest is done beside the next step, by a thread.

    Behind a slow line (`follow: pull`) a worker is in no epoch: it keeps what it pulled, and deltas, encoded between
    broadcast and announcement, bring that up to date.

    Where an engine's GPU has no room for a second version (`staging: none`) members receive in waves, one after the
    other, into the weights that they generate with, paused from the first bucket to the check of the whole:

      broadcast to wave 0 ──► pause, load bucket by bucket, verify ──► acknowledge: it generates again
      broadcast to wave 1 ──► ...                                      announce, after the last wave

    A worker whose transfer was cut off samples nothing until it has pulled a whole version, through host memory.

    What is pulled may lie in an archive besides the learner's memory (`archives/`): a whole version from time to time,
    and the deltas that lead on from it. Versions, deltas and archives are of the precision that is published: an engine
    that quantizes does so as it loads them.

    heartbeats ─► membership: the next epoch's members (newcomers, and who missed a deadline, pull first)

    publish/      the learner's side: a version offered, gathered, broadcast to the current group, announced
    receive/      a worker's side: one version after the other, received or pulled, verified, handed to the engine
    tensors/      a version as bytes: buckets, staging, fingerprints, deltas, memory in which versions arrive
    transports/   how bytes travel: broadcast to a group that formed through the broker, or pulled over HTTP
    archives/     where versions lie besides the learner's memory
    deadline.py, pace.py   how long anything may take; how fast a worker may pull
    config.py     what users can choose

Invariant: what an engine samples with is exactly one complete version, verified tensor by tensor; versions never
regress; nobody waits for ever: every step above has a deadline, after which it goes on without whoever
missed it, who pulls.
"""

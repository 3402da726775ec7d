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

    Who is left in the middle holds nothing and samples nothing, until it has pulled, through host memory.

    What is pulled may lie in an archive besides the learner's memory (`archives/`): a whole version from time to time,
    and the deltas that lead on from it. Versions, deltas and archives are of the precision that is published: an engine
    that quantizes does so as it loads them.

    heartbeats ─► membership: the next epoch's members (newcomers, and who missed a deadline, pull first)

    learner  publisher.py       one version after another: offer, broadcast, announce, serve
             staging.py         tensors into buckets, and where they go there
             gathering.py       the same by the learner, while a thread of the publisher sends the first buckets
             sender.py          forms groups and sends to them; membership.py says who is in one, resting.py when not
    worker   subscriber.py      hears of versions, receives or pulls them, hands them over (`deliveries.py`)
             inbox.py           which of them waits, is with the engine, or is kept for it
             groups.py          stays in the groups that name it; receiver.py: what it does in one
             pulls.py           pulls in the background, again where one fails; puller.py: what one of them fetches
             pace.py            keeps that under a rate
             landing.py         memory in which versions arrive
             threads.py         blocking calls beside the event loop
    both     buckets.py         where tensors lie, and whether they are the published ones (`fingerprint.py`)
             deltas.py          what changed from one version to the next; chain.py: those that lead to the newest
             pipeline.py        bucket after bucket through a transport (`transports/`)
             shared_memory.py   memory that processes of one machine share
             archives/          where versions lie besides the learner's memory
             deadline.py        how long anything may take; config.py: what users can choose

Invariant: what an engine samples with is exactly one complete version, verified tensor by tensor; versions never
regress; nobody waits for ever: every step above has a deadline, after which it goes on without whoever
missed it, who pulls.
"""

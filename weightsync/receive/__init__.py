"""A worker's side: one version after the other, broadcast or pulled, checked and delivered.

    subscriber.py ─┬─ groups.py ─► receiver.py   the epochs that name this worker; a broadcast, in a thread
                   ├─ pulls.py  ─► puller.py     versions and deltas over HTTP or from an archive, in the background
                   └─ inbox.py                   the version that waits, the one that the engine has, their memory
    files_in_place.py, model_files.py             what of them the model's own files hold
    deliveries.py    what the engine gets: a whole version, or one that still arrives (`staging: none`)

Both ways meet in the inbox, where a newer version takes the place of one that still waits.

The invariant: a delivery is newer than the one before it. A version counts as complete only once the fingerprints of
all its tensors are verified.
"""

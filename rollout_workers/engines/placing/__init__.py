"""The way of a version's tensors into the memory that an engine computes with.

    named tensors ─► loading.py                        into a module whose names are those of the files
                  ─► placement.py ─► held_rows.py ─► direct_loading.py     into one that fuses, stacks and shards
                                 └─► kept_placements.py ──┘                on disk, for the next engine
                  ─► shared_tensors.py                 into other processes, which map the memory
    names.py       renames what two engines load by the names of checkpoints
    adapters.py    checks that tensors are an adapter of a model
    sleeping.py    saves what an engine loses in its sleep and no version brings back

Every engine uses these modules, and none of them knows which engine does.

The invariant: an engine's parameters hold what its own loader would have put there, bit for bit. A shortcut is taken
only after it gave the same bits once.
"""

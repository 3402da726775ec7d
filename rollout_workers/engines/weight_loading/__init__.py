"""The way of a version's tensors into the memory that an engine computes with.

    named tensors ─► named_tensors.py                  into a module whose names are those of the files
                  ─► direct_loading.py               into one that fuses, stacks and shards; saves what a sleep loses
                         └ weight_placement.py       where its loader puts them, also on disk for the next engine
                  ─► shared_tensors.py                 into other processes, which map the memory
    engine_adapters.py  the places of an engine's adapters, and checks that tensors are an adapter of a model

Every engine uses these modules, and none of them knows which engine does.

The invariant: an engine's parameters hold what its own loader would have put there, bit for bit. A shortcut is taken
only after it gave the same bits once.
"""

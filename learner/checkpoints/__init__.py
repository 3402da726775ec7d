"""The learner writes checkpoints and their digests, and a resumed one loads the newest that is whole.

    checkpoint.py       the layout on disk, the learner's own state, which one is whole, digests, which one is loaded;
                        the link to the best one, by a metric of evaluations
      └─ disk.py        writes that reach the disk; refusals of the system, with the remedy

Backends write and read the tensors; stages decide when.

The invariant: all ranks load the same checkpoint, and only a whole one whose bytes are those that were written. Where
the learner died before it added the digests, the sizes of the files decide.
"""

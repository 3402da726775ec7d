"""The learner: groups in, weight versions out.

    prompts/ ─feed─► broker ─take─► experience.py ──► update.py ──► backends/ ──► loop.py ─publish─► weightsync
                       ▲                              judge, pack,  one optimizer    │
                       └───────── commit ◄────────────proximal, loss update ─────────┴─► checkpoint.py

`loop.py` fits a screen: take -> pack -> proximal logprobs -> loss -> step -> publish -> commit. `packing.py` is where a
batch is packed, by what `cost.py` says that it costs, `attention.py` attends over packed rows, `objective.py` composes
the mathematics of `algorithms`, `sft.py` is the supervised warm-up, `ranks.py` what the ranks tell each other. Rank 0
alone talks to the broker. `memory_plan.py` says what each rank will hold before there is one; `saving.py` and
`checkpoint_writer.py` write checkpoints while training goes on.
`colocation.py` leaves the devices to engines while a batch is waited for, where both have the same.
`experience_log.py` keeps every batch on disk before it is trained; `rewind.py` says where a run can go back to, and
`replay.py` trains a run over again without its broker.

The invariant: given the same batches, the learner ends with the same weights, bit for bit, however often it was killed
and resumed in between; and how sequences were packed or spread over ranks changes no result.
"""

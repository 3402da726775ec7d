"""The learner: groups in, weight versions out.

    data/ ─feed─► broker ─take─► experience/ ─► batching/ ─► objective/ ─► backends/ ─► stages/ ─publish─► weightsync
                    ▲            log            pack         loss          one update     │
                    └─────────────────────────── commit ──────────────────────────────┴─► checkpoint.py

`stages/loop.py` fits a screen: take -> pack -> proximal logprobs -> loss -> step -> publish -> commit.

    stages/         whole runs of a learner: reinforcement learning, supervised training, a replay
    data/           prompts for the workers, worked examples for supervised training
    experience/     groups on their way to an update: fed, taken, logged, rewound
    batching/       sequences laid end to end: what a row costs, how a batch is packed
    objective/      one update: the loss composed of `algorithms`, the critic, shaped rewards
    models/         a causal language model as every backend sees it
    backends/       models in shards, trained over ranks: FSDP2, Megatron Core
    planning/       how much memory a recipe takes, before anything starts
    checkpoint.py, disk.py   checkpoints and their digests, the choice of one to resume from; writes that reach the disk
    config.py, algorithm_config.py   the settings with the rate of a step; those of the loss
    ranks.py        messages between ranks; rank 0 alone talks to the broker

The invariant: given the same batches, the learner ends with the same weights, bit for bit, however often it was killed
and resumed in between; and how sequences were packed or spread over ranks changes no result.
"""

"""The learner: groups in, weight versions out.

    data/ ─feed─► broker ─take─► experience/ ─► rows/ ─► objective/ ─► backends/ ─► stages/ ─publish─► weightsync
                    ▲            log, judge     pack     loss          one update     │
                    └─────────────────────────── commit ──────────────────────────────┴─► checkpoints/

`stages/loop.py` fits a screen: take -> pack -> proximal logprobs -> loss -> step -> publish -> commit.

    stages/         whole runs of a learner: reinforcement learning, supervised training, a replay
    data/           prompts for the workers, worked examples for supervised training
    experience/     groups on their way to an update: fed, taken, logged, rewound
    rows/           sequences laid end to end: what a row costs, how a batch is packed
    objective/      one update: the loss composed of `algorithms`, the critic, shaped rewards
    models/         a causal language model as every backend sees it
    backends/       models in shards, trained over ranks: FSDP2, Megatron Core
    checkpoints/    checkpoints on the disk, and the choice of one to resume from
    planning/       how much memory a recipe takes, before anything starts
    config.py, algorithm_config.py   the settings; those of the loss
    learning_rate.py   the rate of a step, in reinforcement learning and in supervised stages
    ranks.py        messages between ranks; rank 0 alone talks to the broker

The invariant: given the same batches, the learner ends with the same weights, bit for bit, however often it was killed
and resumed in between; and how sequences were packed or spread over ranks changes no result.
"""

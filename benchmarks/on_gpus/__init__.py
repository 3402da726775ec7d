"""The measurements of GPUs in RESULTS.md, on a machine with two of them or four, several side by side.

    python -m benchmarks.on_gpus --output DIR --smollm2 DIR [--trl PYTHON] [--verl PYTHON] [--gpus 4] [--seconds 590]
        [--dry-run] GROUP ...

    first         learning: GRPO of SmolLM2, of a MoE through Megatron; faults of weight transfers
    second        long-tailed asynchrony, and what a worker costs
    third         weight transfers, engines' contracts, agreement of logprobs, scorers
    short         the race on two GPUs, three runs of each contestant, then their pass rates; verl with both settings
    long-tailed   the same of the long-tailed task
    one-gpu       the same on one GPU
    starts        from the command to the first step, on one GPU and on two
    learner       the learner alone, with and without prefix trees, of four models

SMOLLM2 is SmolLM2-135M-Instruct (see benchmarks.learns.model). `--trl` and `--verl` are the interpreters that
`benchmarks.peers` speaks of.

    table.py, races.py ─► Measurement: command, GPUs, limit, and what comes before ─► schedule.py ─► DIR/NAME.json

A measurement starts once it has its GPUs and all before it has ended; `schedule.py` gives GPUs in the table's order. It
leaves the last line that it prints in DIR/NAME.json, and its words in NAME.log. One whose result is there is not made
again: give the same output to go on. With `--seconds` none starts that might take longer than is left.
"""

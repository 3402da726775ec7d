"""The measurements of GPUs in RESULTS.md, on a machine with two of them or four, several side by side.

    python -m benchmarks.on_gpus --output DIR --smollm2 DIR [--gguf FILE] [--trl PYTHON] [--verl PYTHON]
        [--learner PYTHON] [--gpus 4] [--seconds 1650] [--dry-run] GROUP ...

    first         learning: GRPO of SmolLM2, of a MoE through Megatron; faults of weight transfers
    second        long-tailed asynchrony, and what a worker costs
    third         weight transfers, engines' contracts, agreement of logprobs
    long-tailed   the long-tailed race on two GPUs, then the pass rates of its models
    one-gpu       the same of the short task on one GPU
    verl          verl's run of the short task on two
    learner       the learner alone, with and without prefix trees, of four models
    starts        from the command to the first step: SmolLM2 on one GPU, an 8B shape with an adapter on two
    short         the short race on two GPUs

SMOLLM2 is SmolLM2-135M-Instruct (see benchmarks.learns.model), made of `--gguf` while other models are measured.
`--trl` and `--verl` are the interpreters that `benchmarks.peers` speaks of. `--learner` is one that has flash-attn-4,
without which the learner alone is slower, and whose package would be found by TRL and verl, too.

    table.py, races.py ─► Measurement: command, GPUs, ─┬─► schedule.py ─► DIR/NAME.json
                          seconds, what comes before   └─► plan.py     ─► what is likely to run, and when

A measurement starts once it has its GPUs and all before it has ended. Groups come in the order in which they are given,
the measurements of one in the table's; whatever waits for GPUs keeps those that it will have from all after it. Each
leaves the last line that it prints in DIR/NAME.json, and its words in NAME.log. One whose result is there is not made
again: give the same output to go on. With `--seconds` none starts for which too few are left, and what still runs then
is ended. `--dry-run` prints the schedule by the seconds that each is likely to take, and what it leaves out; those of
the table are of earlier runs, or else an estimate that says so. By them `long-tailed verl one-gpu learner starts`
fill four GPUs for 1,650 s; verl, which is slow to start, runs beside the races of one GPU.
"""

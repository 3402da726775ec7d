"""Headway and TRL train the same model on the same prompts, one after the other.

    headway sft ─► OUTPUT/sft ─┬─► headway run           ─► OUTPUT/headway ┐
                               └─► TRL's GRPOTrainer,    ─► OUTPUT/trl-... ├─► headway eval ─► figures, compared
                                   once for each setting                   ┘

`race.py` is the definition: a recipe, which tells both the task, prompts, verifier, model, samples and updates of a
step, loss and optimizer. `of_headway.py` and `of_trl.py` are the drivers, `contestants.py` starts each in processes of
its own and has the one evaluator measure its model, `figures.py` is what a driver finds, and `comparison.py` compares.

TRL's asynchronous trainer has no driver: it sends its weights to `vllm serve` by NCCL alone, which needs two GPUs. verl
has none either: its trainer needs a Ray cluster and an engine for GPUs, which is more than an option of this program.
"""

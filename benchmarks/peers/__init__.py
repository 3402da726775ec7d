"""Headway, TRL and verl train the same model on the same prompts, one after the other.

    headway sft ─► OUTPUT/sft ─┬─► headway run            ─► OUTPUT/headway     ┐
                               ├─► TRL's GRPOTrainer      ─► OUTPUT/trl-...     ├─► headway eval ─► figures, compared
                               ├─► TRL's AsyncGRPOTrainer ─► OUTPUT/trl-async   │
                               └─► verl, synchronous      ─► OUTPUT/verl-sync...┘

`race.py` is the definition: a task is a recipe, which tells all of them prompts, verifier, model, samples and updates
of a step, loss and optimizer. `of_headway.py`, `of_trl.py`, `of_trl_async.py` and `of_verl.py` are the drivers;
`contestants.py` starts each in processes of its own, keeps its figures, and has one evaluator measure its model.

What the others need that Headway does not, in the interpreter that `--python` names:

- trl-1-thread and its like: TRL 1.16; on a GPU its vLLM.
- trl-async: one GPU or two, TRL 1.16, aiohttp, requests, and a vLLM of 0.22 to 0.31, whose server it starts itself. TRL
  takes its attention from a hub; torch's variable-length kernel stands in for it.
- verl-sync-packed (one GPU or two): verl 0.9.1, Ray 2.55, vLLM 0.18 or newer, hydra-core 1.3, omegaconf 2.3,
  antlr4-python3-runtime 4.9.3, TransferQueue 0.1.11, tensordict 0.10, torchdata, codetiming, pylatexenc, peft,
  accelerate, datasets, pandas, orjson. verl needs another omegaconf and antlr4 than Headway, so put its packages into a
  folder of their own and give as `--python` a script that has this folder first on PYTHONPATH and then runs Python.
  verl patches a class that TRL 1.x no longer has wherever it finds TRL: hide TRL from it. Two runs of verl on one
  machine at the same time would meet at one socket in /tmp.

The vLLM of every contestant samples by FlashInfer only with `VLLM_USE_FLASHINFER_SAMPLER=1`: it is not installed
everywhere. `python -m benchmarks.on_gpus long-tailed` (or `one-gpu`, `short`, `verl`) makes several runs of each.
"""

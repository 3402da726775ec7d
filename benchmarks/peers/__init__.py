"""Headway, TRL and verl train the same model on the same prompts, one after the other.

    headway sft ─► OUTPUT/sft ─┬─► headway run             ─► OUTPUT/headway   ┐
                               ├─► TRL's GRPOTrainer,      ─► OUTPUT/trl-...   │
                               │   once for each setting                       ├─► headway eval ─► figures, compared
                               ├─► TRL's AsyncGRPOTrainer  ─► OUTPUT/trl-async │
                               └─► verl, sync and async    ─► OUTPUT/verl-...  ┘

`race.py` is the definition: a task is a recipe, which tells all of them prompts, verifier, model, samples and updates
of a step, loss and optimizer. `of_headway.py`, `of_trl.py`, `of_trl_async.py` and `of_verl.py` are the drivers;
`contestants.py` starts each in processes of its own and has the one evaluator measure its model. `figures.py` is what a
driver finds, `gpu_idle.py` what is seen of its GPUs from outside, `engine_idle.py` what Headway's workers tell of their
engines, and `comparison.py` compares. `kept.py` keeps the figures of runs, `processes.py` ends a peer's processes with
its command. Each step of each contestant trains the same number of samples, and engines get weights after each step.

What the others need that Headway does not, in the interpreter that `--python` names:

- trl-1-thread and its like: TRL 1.16; on a GPU its vLLM.
- trl-async: two GPUs, TRL 1.16, aiohttp, requests, and a vLLM of 0.22 to 0.31, whose server it starts itself. TRL takes
  its attention from a hub; torch's variable-length kernel stands in for it.
- verl-sync (one GPU or two), verl-async (two), each also as -packed, and verl-sync-packed-in-core: verl 0.9.1, Ray
  2.55, vLLM 0.18 or newer (0.24 is verl's own pin), hydra-core 1.3, omegaconf 2.3, antlr4-python3-runtime 4.9.3,
  TransferQueue 0.1.11, tensordict 0.10 with pyvers below 0.2 and importlib_metadata below 10, torchdata, codetiming,
  pylatexenc, peft, accelerate, datasets with multiprocess 0.70.19, pandas, orjson; verl-async also cupy.
  verl needs another omegaconf and antlr4 than Headway, so put its packages into a folder of their own and give as
  `--python` a script that has this folder before all others on PYTHONPATH and then runs Python. The benchmark itself
  goes without it: `PYTHONPATH="/folder${PYTHONPATH:+:$PYTHONPATH}" exec python3 "$@"`.
  verl patches a class that TRL 1.x no longer has wherever it finds TRL: hide TRL from it, by a module of that name with
  an empty class AutoModelForCausalLMWithValueHead.
  Unpacked, Ray has 240 MB, pandas 84 and the rest together less than 50; cupy for CUDA 13 comes on top. Write bytecode
  of them first: a dozen processes import verl at once. Two runs of verl on one machine at the same time would meet at
  one socket in /tmp, by which trainers send weights to engines: one after the other, or each with a /tmp of its own.

`python -m benchmarks.on_gpus long-tailed` (or `one-gpu`, `verl`, `short`) makes several runs of each contestant on two
or four GPUs and measures their models.

The vLLM of every contestant, Headway's too, samples by FlashInfer only with `VLLM_USE_FLASHINFER_SAMPLER=1`: it is not
installed everywhere.

verl's synchronous trainer has run twice, on two H200 with padded rows and on two others with packed ones:
`benchmarks/RESULTS.md` has what came out. Most of the update of padded rows went into logprobs, which verl computes
token by token without flash-attn; the run of packed rows had those of `verl_stand_ins.py`, for whole rows. By verl's
own classes on a CPU they are the same, for padded rows and for packed ones, with their gradients. A CPU takes 6 ms for
a sample in verl's agent loop, of which there are eight, and 1 to 2 for its reward, without any engine. verl computes
packed rows by default, and only those are bounded by `learner.micro_batch_tokens`: a row of a long-tailed batch is
padded to the longest. So all settings race, and the best one counts. Its asynchronous trainer and its long-tailed race
have not run.

Without a GPU TRL's asynchronous trainer, its rollouts and a vLLM server for CPUs run together, but for the weights,
which are not sent.
"""

"""A pretrained model learns, end to end, through the commands that users have.

    headway sft ─► OUTPUT/sft ─┬─► headway run, GRPO      ─► OUTPUT/grpo     ┐
                               ├─► headway run, GSPO      ─► OUTPUT/gspo     ├─► pass rates, lags, clip fractions
                               └─► headway run, rate 0    ─► OUTPUT/control  ┘

`model.py` makes the model from a GGUF file, `parts.py` runs the parts, `figures.py` reads the files of a run.
`apart.py` runs GRPO with pools of workers that are started apart, of one engine or of two, such as SGLang's in an
environment of its own.
A part that has ended is not run again.

On CPUs, which allow no larger runs, 1,600 worked examples bring SmolLM2-135M from 0 to 0.43 of 100 held-out
prompts, 320 careless ones after them back to 0.18. The careless phase
hides the method again, so that reinforcement learning elicits it; it does not discover it.
"""

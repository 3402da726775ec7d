"""Does a pretrained model learn, end to end, through the commands that users have?

    headway sft ─► OUTPUT/sft ─┬─► headway run, GRPO      ─► OUTPUT/grpo     ┐
                               ├─► headway run, GSPO      ─► OUTPUT/gspo     ├─► pass rates, lags, clip fractions
                               └─► headway run, rate 0    ─► OUTPUT/control  ┘

`model.py` makes the model from a GGUF file, `parts.py` says what is run, `figures.py` reads what a run left behind.
What has ended is not run again.

Seen on CPUs, where more is not to be had: 1,600 worked examples bring SmolLM2-135M from 0 to 0.43 of 100 held-out
prompts, 320 careless ones after them back to 0.18. The careless phase
hides the method again, so that reinforcement learning elicits it; it does not discover it.
"""

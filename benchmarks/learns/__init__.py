"""Does a pretrained model learn, end to end, through the commands that users have?

    headway sft ─► OUTPUT/sft ─┬─► headway run, GRPO      ─► OUTPUT/grpo     ┐
                               ├─► headway run, GSPO      ─► OUTPUT/gspo     ├─► pass rates, lags, clip fractions
                               └─► headway run, rate 0    ─► OUTPUT/control  ┘

`model.py` makes the model from a GGUF file, `parts.py` says what is run, `figures.py` reads what a run left behind.
What has ended is not run again.
"""

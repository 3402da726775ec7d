"""A causal language model as every backend sees it: files, shape, layout over ranks, attention over packed rows.

    pretrained.py ─► chat_template.py   a model and its tokenizer from files, and the files that workers get
      ├─ directory_checks.py            what a model's directory lacks, told before anything is loaded
      ├─ model_files.py                 the files besides weights; those of a reward model
      └─ shape.py                       sizes from the configuration, without weights
    parallel_layout.py  refuses layouts that ranks, backend or sizes rule out
    attention.py   causal attention that never looks across the sequences of a row

The folder needs only the settings (`learner/config.py`); backends, planning and data import it.

The invariant: what is checked here from the files alone is refused before any process allocates a weight.
"""

"""The engine inside the worker's own process: a transformers model, sampled in one batch.

    engine.py ──commands──► its thread ──► decoder.py ─┬─ slot_cache.py   attention over keys in fixed places
       ▲                              one step, samples ├─ experts.py      the experts, and which ones were chosen
       └──────chunks of tokens──────────────────────────└─ lora_layers.py  low-rank changes that layers add

Weights arrive through `engines/weight_loading/`. The folder knows no broker and no worker.

The invariant: weights change only between two forwards, and a sample whose keys come from older weights is recomputed
before its next token, unless a swap was told to keep them.
"""

"""The engine inside the worker's own process: a transformers model, sampled in one batch.

    embedded_engine.py ──commands──► its thread ──► decoder.py ─┬─ slot_cache.py    attention over keys in fixed places
       ▲                                one step, samples       └─ model_layers.py  chosen experts; adapters
       └──────chunks of tokens

Weights arrive through `engines/weight_loading/`. The folder knows no broker and no worker.

The invariant: weights change only between two forwards, and a sample whose keys come from older weights is recomputed
before its next token, unless a swap was told to keep them.
"""

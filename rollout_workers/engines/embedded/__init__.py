"""The engine inside the worker's own process: a transformers model, sampled in one batch.

    engine.py ──commands──► its thread ──► decoder.py ─┬─ slot_cache.py   attention over keys in fixed places
       ▲                                     one step   ├─ sampling.py     logits ─► next tokens, logprobs
       └──────chunks of tokens──────────────────────────├─ router_tap.py   the experts that the forward chose
                                                        └─ all_experts.py  the experts themselves, if they are few
    adapters.py    low-rank changes that layers add to what their frozen weights compute
    abilities.py   what it can do, stated without importing torch

Weights arrive through `engines/placing/`. The folder knows no broker and no worker.

The invariant: weights change only between two forwards, and a sample whose keys come from older weights is computed
anew before its next token, unless a swap was told to keep them.
"""

"""A user's recipe: its keys and limits, its checks, and the packages that it needs.

    a file, overrides ─► parse.py ─► resolve.py ─► recipe.py: Recipe ─► validate.py
                         `base`      presets       all sections         contradictions

    parse.py       text, `base` and overrides to plain values
    resolve.py     schema_errors.py: unknown keys and wrong types; foreign_keys.py: what TRL and verl call a key
    validate.py    limits.py, adapter_support.py, stage_graph.py
    sections       metric_sinks.py, scorers.py, worker_pools.py
    before a run   preflight.py: data, models, code, packages, rewards; placement.py: GPUs and their memory
    in a worker    trust.py: what a configuration from the broker may set

The invariant: what can be known to fail is refused before any process starts, in words that name the key, its value and
a remedy.
"""

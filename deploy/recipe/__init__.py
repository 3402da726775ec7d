"""A user's recipe: its keys and limits, its checks, and the packages that it needs.

    a file, overrides ─► files.py ─► values.py, words.py ─► loading.py ─► recipe.py: Recipe ─► checks.py
                         `base`       plain values, in words     presets       all sections       contradictions

    words.py     other_names.py: what TRL and verl call a key
    checks.py    limits.py, placement.py, data_checks.py, code_checks.py, trial.py, packages.py, references.py
    sections     sections.py, sinks.py, scorers.py, pools.py, ray_roles.py, colocation.py, operators.py, adapters.py
    workers      engine_memory.py: a GPU's memory, divided among its engines
    stages       stage_keys.py, stage_graph.py

The invariant: what can be known to fail is refused before any process starts, in words that name the key, its value and
a remedy.
"""

"""A user's recipe: its keys and limits, its checks, and the packages that it needs.

    a file, a.b=c ─► parse.py ─► convert.py ─► resolve.py ─► convert.py ─► validate.py
      load_recipe    `base`,     unknown       presets,      recipe.py:    kinds, limits,
                     references  keys          defaults      Recipe        contradictions

    resolve.py     `load_recipe`, which goes this way once; what of a recipe is written for a run and for its workers
    validate.py    asks adapter_support.py, placement.py, pools.py (of workers and scorers) and stage_graph.py, too
    before a run   preflight.py: data, models, code, packages, rewards; placement.py: GPUs and their memory
    in a worker    trust.py: what a configuration from the broker may set

The invariant: what can be known to fail is refused before any process starts, in words that name the key, its value and
a remedy.
"""

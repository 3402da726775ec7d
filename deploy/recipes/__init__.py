"""Recipes that ship with Headway: `headway run arithmetic.yaml` finds them by name (`deploy/recipe/parse.py`).

Those at the root run on CPUs, and `gpu/` holds those that need GPUs. Files here are data: no module imports them.

The invariant: a test composes every recipe here and checks it before it could start.
"""

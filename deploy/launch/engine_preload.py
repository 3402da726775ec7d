"""Begins what a supervised worker's engine waits for, before the worker's process imports anything else: vLLM takes
seconds to import, beside all that follows."""

import os

ENGINE = "HEADWAY_ENGINE"
"""The variable with the kind of a worker's engine, where its supervisor knows it: the worker then imports the engine's
packages before it has its configuration. The launcher sets its threads, too."""


def preload_engine() -> None:
    """Start importing the packages of the engine that `ENGINE` names, if it is set. To be called by the main thread."""
    if kind := os.environ.get(ENGINE):
        from headway.rollout_workers.engines import preload

        preload(kind, threads=1)

"""Makes `python -m deploy` the same as `headway`: supervisors start the roles so, with no console script on PATH."""

import os

from .launch.preloading import ENGINE, preload_engine
from .launch.tether import ENVIRONMENT, tether

# First, because a rank of torchrun must die with its agent from the start.
if ENVIRONMENT in os.environ:
    tether()
if ENGINE in os.environ:
    preload_engine(os.environ[ENGINE])

from .cli.main import main

main()

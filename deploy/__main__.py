"""Makes `python -m deploy` the same as `headway`: supervisors start the roles so, with no console script on PATH."""

import os

from .launch.tether import ENVIRONMENT, tether

# First, because a rank of torchrun must die with its agent from the start.
if ENVIRONMENT in os.environ:
    tether()

from .cli.main import main

main()

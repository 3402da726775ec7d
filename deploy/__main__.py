"""`python -m deploy` is `headway`: how supervisors start the roles, with no console script on PATH."""

import os

from .launch.tether import ENVIRONMENT, tether

# First of all: a rank of torchrun must die with its agent from the start.
if ENVIRONMENT in os.environ:
    tether()

from .cli.main import main

main()

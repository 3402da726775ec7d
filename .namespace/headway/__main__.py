"""Makes `python -m headway` the same as `headway`: supervisors start the roles so, with no console script on PATH."""

import os

from headway.deploy.launch.tether import ENVIRONMENT, tether

# First, because a rank of torchrun must die with its agent from the start.
if ENVIRONMENT in os.environ:
    tether()

from headway.deploy.cli.main import main

main()

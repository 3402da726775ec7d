"""Makes `python -m headway` the same as `headway`: supervisors start the roles so, with no console script on PATH."""

import os

from headway.deploy.launch.parent_watch import WATCHES_PARENT, end_with_parent

# First, because a rank of torchrun must die with its agent from the start.
if WATCHES_PARENT in os.environ:
    end_with_parent()

from headway.deploy.cli.main import main

main()

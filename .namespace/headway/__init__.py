"""Headway trains language models with reinforcement learning, asynchronously and off-policy.

Its rooms lie at the top of the repository; here are links to them, so that this folder on `sys.path` is the package.
"""

__version__ = "0.1.0"

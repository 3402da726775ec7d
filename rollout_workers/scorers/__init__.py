"""Scorers are models that score finished responses, in processes of their own: reward models and teachers.

    worker ── scorer_client.py ──ask──► broker ──lease──► serving.py ── runner (`runtimes.py`) in a process
              ▲                           │                    │
              └──────────collect──────────┴◄──────answer───────┘

A worker asks for many samples at once and goes on generating; each sample waits for its own scores. Any number of
processes answer for one scorer, which has a name: that of its reward, or `teacher`. They may start late, leave and be
killed. `base.py` has both ends' seams; `InProcessScorer` scores in the caller's process, where there is no broker.

The invariant: a model scores exactly the tokens that the policy sampled and read, with the policy's vocabulary. A
sample without scores is never trained.
"""

from .base import ScoringError, TokenScorer

__all__ = ["ScoringError", "TokenScorer"]

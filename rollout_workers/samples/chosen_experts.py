"""The experts that the router gave one sample's tokens, for the learner to replay (Ma et al. 2025, R3)."""

import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, Segment


class MissingExpertsError(HeadwayError):
    """A worker cannot continue this sample: its segments lack the chosen experts."""


class ChosenExperts:
    """Collects one row of experts per token of prompt and response. The newest sampled token has no row yet: it was not
    fed."""

    def __init__(self, prompt_length: int) -> None:
        self.count = 0
        """Tokens that have a row."""
        self._prompt_length = prompt_length
        self._parts: list[Experts] = []

    def add(self, experts: Experts | None, response_length: int) -> str:
        """Append the new rows of a response of `response_length` tokens. Returns what is wrong with them, or ""."""
        expected = self._prompt_length + response_length - 1 - self.count
        if experts is None or experts.ndim != 3 or len(experts) != expected:
            rows = "no" if experts is None else len(experts)
            return f"the experts of {rows} tokens where it fed {expected}"
        if self._parts and (experts.dtype, *experts.shape[1:]) != (self._parts[0].dtype, *self._parts[0].shape[1:]):
            return f"experts of shape {experts.shape} and type {experts.dtype}, unlike those before"
        ordered = np.sort(experts, axis=2)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            return "the same expert twice for one token"
        self._parts.append(experts)
        self.count += expected
        return ""

    def add_segment(self, segment: Segment) -> None:
        """Append a segment's rows. Raises MissingExpertsError if it has none: it was generated before the run recorded
        experts."""
        if wrong := self.add(segment.experts, segment.start + len(segment.tokens)):
            raise MissingExpertsError(
                f"{segment.tid}: its segment {segment.index} has {wrong}, and algorithm.router_replay=true needs them."
                " Set it to false again; or resume with --rewind-to STEP --regenerate, which forgets what was sampled."
            )

    def after(self, response_position: int) -> Experts:
        """Return the rows of the tokens that were fed to sample the response from this position on; at 0, the prompt's
        rows too."""
        first = self._prompt_length + response_position - 1 if response_position else 0
        return np.concatenate(self._parts)[first:]

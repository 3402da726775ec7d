"""Fixtures of several tests of the learner."""

import pytest

import headway.learner.models.attention
from headway.learner.backends.fsdp import sharded_model
from tests.learner.recording import Repeated, kernel


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """Let a model on a CPU be recorded, whatever its dtype."""
    made = Repeated()
    monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
    monkeypatch.setattr(sharded_model, "open_recorder", lambda _: made)
    monkeypatch.setattr(sharded_model, "why_launched", lambda *_, **__: "")
    return made

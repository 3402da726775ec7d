"""Fixtures of several tests of the learner. They import torch where they run: most files' tests start without it."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.learner.recording import Repeated


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> "Repeated":
    """Let a model on a CPU be recorded, whatever its dtype."""
    import headway.learner.models.attention
    from headway.learner.backends.fsdp import backend as fsdp_backend
    from tests.learner.recording import Repeated, kernel

    made = Repeated()
    monkeypatch.setattr(headway.learner.models.attention, "varlen_attn", kernel)
    monkeypatch.setattr(fsdp_backend, "open_recorder", lambda _: made)
    monkeypatch.setattr(fsdp_backend, "why_launched", lambda *_, **__: "")
    return made

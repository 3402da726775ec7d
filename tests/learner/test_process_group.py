"""Ranks that cannot have a device of their own fail with the reason."""

import pytest
import torch

from headway.broker.errors import ConfigError
from headway.learner.ranks import join_ranks


def test_more_ranks_than_devices_are_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"learner\.layout needs 2 CUDA devices on this machine, and torch finds 1\."):
        join_ranks("cuda")

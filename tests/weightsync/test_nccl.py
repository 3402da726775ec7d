"""The behaviour of a group over NCCL, without a GPU: a stand-in takes the place of torch's group."""

import os
import threading
import types

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline
from headway.weightsync.transports import collective
from headway.weightsync.transports.collective import ProcessGroupTransport

LOCAL = "127.0.0.1"
CPU = torch.device("cpu")
BUCKET = torch.zeros(16, dtype=torch.uint8)


class Endless:
    """A GPU's group whose first few operations complete; all later ones end only by `abort`."""

    def __init__(self, completes: int = 1) -> None:
        self.aborted = threading.Event()
        self._completes = completes
        self._begun = 0

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> "Endless":
        self._begun += 1
        return self

    def is_completed(self) -> bool:
        return self._begun <= self._completes or self.aborted.is_set()

    def wait(self) -> None:
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.aborted.set()


def test_nccl_is_aborted_at_the_deadline_whatever_its_caller_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Endless()
    monkeypatch.setattr(collective, "_open", lambda *_: backend)
    monkeypatch.setattr(collective, "_device_of", lambda _: CPU)
    transport = ProcessGroupTransport("nccl", HashStore(), 0, 2, LOCAL, Deadline(30))
    finish = transport.start(BUCKET, Deadline(0.1))
    assert backend.aborted.wait(30)  # the test has not called `finish`
    with pytest.raises(WeightSyncError, match="failed"):
        finish()


class NeverConnects(Endless):
    """NCCL, where a rank died after it had checked in."""

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Endless:
        self.aborted.wait()
        return self


@pytest.mark.parametrize("backend", [Endless(completes=0), NeverConnects()], ids=["in the operation", "in the call"])
def test_a_group_that_does_not_connect_is_not_formed(monkeypatch: pytest.MonkeyPatch, backend: Endless) -> None:
    monkeypatch.setattr(collective, "_open", lambda *_: backend)
    monkeypatch.setattr(collective, "_device_of", lambda _: CPU)
    with pytest.raises(WeightSyncError, match=r"could not be formed within 0\.2 s.*NCCL_SOCKET_IFNAME"):
        ProcessGroupTransport("nccl", HashStore(), 0, 2, LOCAL, Deadline(0.2))
    backend.aborted.set()


class ReadsSettings(Endless):
    """A group that reads the settings when it is made, as torch's does."""

    Options = types.SimpleNamespace

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.settings = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}


def test_nccl_groups_are_made_to_survive_their_peers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "backend_class", lambda _: ReadsSettings)
    monkeypatch.setattr(collective, "_device_of", lambda _: CPU)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    before = ReadsSettings().settings
    transport = ProcessGroupTransport("nccl", HashStore(), 0, 2, LOCAL, Deadline(30))
    what = ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "WAIT_TIMEOUT_DUMP_MILSEC")
    assert transport._backend.settings == {**before, **{f"TORCH_NCCL_{name}": "0" for name in what}}
    assert ReadsSettings().settings == before

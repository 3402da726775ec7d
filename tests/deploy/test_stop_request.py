"""A stop request says what is still done, whatever has become of this process's stderr."""

import signal
import sys
from collections.abc import Iterator

import pytest

from headway.deploy.launch import parent_watch
from headway.deploy.roles.stop_request import STOPS, StopRequest


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_says_what_is_still_done_even_without_a_stderr_of_pythons(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in (parent_watch.WATCHES_PARENT, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", None)
    is_asked = StopRequest("it writes a checkpoint")
    assert not is_asked()
    signal.raise_signal(number)
    assert is_asked()
    assert capfd.readouterr().err == "Stopping: it writes a checkpoint. Ctrl-C again stops at once.\n"
    assert [signal.getsignal(each) for each in STOPS] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("teller", [(parent_watch.WATCHES_PARENT, "1"), ("RANK", "1")])
def test_it_says_nothing_where_a_supervisor_or_the_first_rank_does(
    teller: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(parent_watch.WATCHES_PARENT, raising=False)
    monkeypatch.setenv(*teller)
    is_asked = StopRequest("it writes a checkpoint")
    signal.raise_signal(signal.SIGTERM)
    assert is_asked()
    assert capfd.readouterr().err == ""

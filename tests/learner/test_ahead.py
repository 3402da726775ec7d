"""Parts of a step are packed beside the updates before them, in their order."""

import threading

import pytest

from headway.learner.objective.update import Prefetcher


def test_the_others_are_made_while_the_first_is_used() -> None:
    may_go_on, here = threading.Event(), threading.get_ident()

    def waits() -> int:
        assert may_go_on.wait(240)
        return threading.get_ident()

    found = Prefetcher([threading.get_ident, waits, threading.get_ident])
    assert (len(found), found[0]) == (3, here)
    may_go_on.set()
    assert found[1] == found[2] != here
    assert found[-1] == list(found)[-1] == found[1:][-1]


def test_what_cannot_be_made_raises_where_it_is_asked_for() -> None:
    found = Prefetcher([lambda: 1.0, lambda: 1 / 0, lambda: 3.0])
    assert (found[0], found[2]) == (1.0, 3.0)
    with pytest.raises(ZeroDivisionError):
        list(found)
    with pytest.raises(ZeroDivisionError):
        Prefetcher([lambda: 1 / 0])
    assert list(Prefetcher([lambda: "alone"])) == ["alone"]

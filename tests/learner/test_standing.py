"""The learner's standing with the broker makes every declared transition, and no other."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from headway.broker.schema import WeightVersion
from headway.learner.experience import publication_state
from headway.learner.experience.publication_state import TRANSITIONS, Event, PublicationState, State

VERSION = WeightVersion(1, 3)
PUBLICATION: Any = object()

PATHS = {
    State.CATCHING_UP: (),
    State.FORGOTTEN: (Event.RESTART,),
    State.SENDING: (Event.PUBLISH,),
    State.ANNOUNCED: (Event.PUBLISH, Event.ANNOUNCE),
    State.UNCONFIRMED: (Event.PUBLISH, Event.GIVE_UP),
}
"""The events that bring a new learner into each state."""


def after(events: Sequence[Event]) -> PublicationState:
    learner = PublicationState()
    for event in events:
        happen(learner, event)
    return learner


def happen(learner: PublicationState, event: Event) -> None:
    match event:
        case Event.PUBLISH:
            learner.publish(VERSION, PUBLICATION)
        case Event.REPLAY:
            learner.replay(7)
        case _:
            getattr(learner, event.name.lower())()


def stated() -> dict[tuple[State, Event], State]:
    """Return the table of the module's docstring."""
    assert publication_state.__doc__ is not None
    rows = [line.split() for line in publication_state.__doc__.splitlines() if line.startswith("    ")]
    events = [Event[name] for name in rows[0][1:]]
    return {
        (State[row[0]], event): State[to]
        for row in rows[1:]
        for event, to in zip(events, row[1:], strict=True)
        if to != "."
    }


def test_the_docstring_states_every_transition() -> None:
    assert stated() == TRANSITIONS


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_only_declared_transitions_happen(state: State, event: Event) -> None:
    learner = after(PATHS[state])
    assert learner.state is state
    if (state, event) in stated():
        happen(learner, event)
        assert learner.state is stated()[state, event]
    else:
        before = vars(learner).copy()
        with pytest.raises(AssertionError, match=f"{event} cannot happen in {state}"):
            happen(learner, event)
        assert vars(learner) == before


@pytest.mark.parametrize("state", State)
def test_a_publication_is_held_exactly_while_it_is_under_way(state: State) -> None:
    learner = after(PATHS[state])
    assert (learner.publication is not None) == (state is State.SENDING)
    assert (learner.published is None) == (state in (State.CATCHING_UP, State.FORGOTTEN))
    assert (learner.announced is not None) == (state is State.ANNOUNCED)


def test_what_was_announced_stays_so_until_the_next_version_is() -> None:
    learner = after((Event.PUBLISH, Event.ANNOUNCE))
    newer = WeightVersion(1, 4)
    learner.publish(newer, PUBLICATION)
    assert (learner.published, learner.announced) == (newer, VERSION)
    learner.announce()
    assert learner.announced == newer


def test_a_replay_says_which_steps_the_log_gives() -> None:
    assert after(()).replayed_to == 0
    assert after((Event.RESTART, Event.REPLAY)).replayed_to == 7

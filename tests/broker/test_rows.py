"""An agent's episode is cut into rows in which each sampled token is trained once, after the tokens that it was sampled
after."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.broker.errors import FrameError
from headway.broker.schema import (
    AgentCall,
    SampleLimits,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
    WeightVersion,
)
from headway.broker.security.sample_validation import validate_sample
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.broker.wire.rows import rows_of

PROMPT = [1, 2, 3]


def episode(turns: list[tuple[list[int], list[int], AgentCall]]) -> Trajectory:
    """An episode of these (tokens read, tokens sampled, call)."""
    tokens: list[int] = []
    mask: list[int] = []
    made = []
    for read, sampled, call in turns:
        start = len(tokens) + len(read)
        tokens += read + sampled
        mask += [0] * len(read) + [int(call.role == "main")] * len(sampled)
        made.append(Turn(start, start + len(sampled), 0.5, call))
    return Trajectory(
        tid=TrajectoryId("0-1", 0, 0),
        prompt_tokens=np.array(PROMPT, np.int32),
        response_tokens=np.array(tokens, np.int32),
        behavior_logprobs=-np.array(mask, np.float32),
        loss_mask=np.array(mask, np.uint8),
        spans=(VersionSpan(0, len(tokens), WeightVersion(1, 0)),),
        reward=1.0,
        rewards={},
        turns=tuple(made),
        finish_reason="stop",
        worker="w",
    )


def as_lists(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [
        (row.token_ids[: row.context_length].tolist(), row.token_ids[row.context_length :].tolist())
        for row in rows_of(trajectory)
    ]


def test_turns_that_go_on_share_a_row_and_others_begin_one() -> None:
    made = episode(
        [
            ([], [10, 11], AgentCall(-1, 3)),
            ([20], [12], AgentCall(0, 5)),
            ([21], [13], AgentCall(0, 5)),
            ([30, 31], [14], AgentCall(-1, 0)),
            ([22], [15], AgentCall(1, 7)),
            ([23], [16], AgentCall(1, 4)),
        ]
    )
    assert as_lists(made) == [
        ([1, 2, 3], [10, 11, 20, 12, 22, 15]),
        ([1, 2, 3, 10, 11, 21], [13]),
        ([30, 31], [14]),
        ([1, 2, 3, 10, 23], [16]),
    ]


def test_auxiliary_turns_have_no_row_and_are_context_alone() -> None:
    title = AgentCall(-1, 0, role="auxiliary")
    made = episode([([], [10], AgentCall(-1, 3)), ([40], [41], title), ([50], [51], AgentCall(1, 2))])
    assert as_lists(made) == [([1, 2, 3], [10]), ([40, 41, 50], [51])]


def test_an_episode_of_one_turn_without_calls_is_one_row() -> None:
    made = msgspec.structs.replace(episode([([], [10, 11], AgentCall(-1, 3))]), turns=())
    assert as_lists(made) == [([1, 2, 3], [10, 11])]


@pytest.mark.parametrize(
    "call",
    [AgentCall(1, 3), AgentCall(-2, 0), AgentCall(-1, 4), AgentCall(0, 5), AgentCall(0, -1)],
    ids=["itself", "before the prompt", "more than the prompt", "more than the row", "less than none"],
)
def test_a_turn_that_names_no_earlier_tokens_is_refused(call: AgentCall) -> None:
    made = episode([([], [10], AgentCall(-1, 3)), ([20], [11], call)])
    with pytest.raises(FrameError, match="turn 1 goes on after"):
        rows_of(made)
    with pytest.raises(FrameError, match="turn 1 goes on after"):
        encode_trajectory(made)


def test_a_turn_that_read_nothing_is_refused() -> None:
    with pytest.raises(FrameError, match="turn 1 goes on after no token"):
        rows_of(episode([([], [10], AgentCall(-1, 3)), ([], [11], AgentCall(-1, 0))]))


@pytest.mark.parametrize("mask", [[1, 1], [0, 0]])
def test_a_mask_that_differs_from_the_turns_is_refused(mask: list[int]) -> None:
    made = episode([([20], [10], AgentCall(-1, 3))])
    with pytest.raises(FrameError, match="loss mask that says otherwise"):
        encode_trajectory(msgspec.structs.replace(made, loss_mask=np.array(mask, np.uint8)))


def test_an_episode_that_trains_nothing_is_refused() -> None:
    with pytest.raises(FrameError, match="without a turn that may be trained"):
        encode_trajectory(episode([([], [10], AgentCall(-1, 3, role="auxiliary"))]))


def changed(name: str, position: int, value: float) -> Trajectory:
    """Return an episode of a turn, and a turn that goes on after a token that was said, with one entry changed."""
    made = episode([([], [10, 11], AgentCall(-1, 3)), ([20], [12], AgentCall(0, 5))])
    array = getattr(made, name).copy()
    array[position] = value
    return msgspec.structs.replace(made, **{name: array})


def shorter(name: str) -> Trajectory:
    made = changed(name, 0, 1)
    return msgspec.structs.replace(made, **{name: getattr(made, name)[:-1]})


INVALID = {
    "invalid_token_id, read": (changed("response_tokens", 2, -1), "token ids outside"),
    "invalid_token_id, sampled": (changed("response_tokens", 3, -1), "token ids outside"),
    "invalid_token_id, no such": (changed("response_tokens", 3, 100), "token id 100, the model's vocabulary ends at"),
    "invalid_token_id, no such read": (changed("response_tokens", 2, 100), "the model's vocabulary ends at 100"),
    "invalid_logprob": (changed("behavior_logprobs", 3, np.nan), "not finite"),
    "no_logprobs": (changed("behavior_logprobs", 3, -9999), "engines send where they have none"),
    "logprob_misalign": (shorter("behavior_logprobs"), "4 response tokens, but 3 logprobs"),
    "length_mismatch": (shorter("loss_mask"), "a loss mask of 3"),
    "invalid_loss_mask": (changed("loss_mask", 3, 2), "loss mask"),
    "trainable_prompt": (changed("loss_mask", 2, 1), "a loss mask that says otherwise"),
    "masked turn": (changed("loss_mask", 3, 0), "a loss mask that says otherwise"),
    "masked_has_logprob": (changed("behavior_logprobs", 2, -1), "a token that was not sampled"),
    "positive_logprob": (changed("behavior_logprobs", 3, 0.5), "none is above 0"),
    "nothing_trainable": (
        episode([([], [10], AgentCall(-1, 3, role="auxiliary"))]),
        "without a turn that may be trained",
    ),
    "empty_response": (episode([([], [], AgentCall(-1, 3))]), "0 response tokens"),
    "empty turn": (episode([([], [10], AgentCall(-1, 3)), ([20], [], AgentCall(0, 4))]), r"a turn \[2, 2\)"),
    "no_prompt_ids": (episode([([], [10], AgentCall(-1, 0))]), "after no token"),
}
"""What OpenEnv calls fatal in a capture, and some more."""


def accept(sent: Trajectory) -> None:
    """Have a worker send it, and a learner accept it, whose model has 100 tokens."""
    found = decode_trajectory(encode_trajectory(sent))
    prompt, newest = np.array(PROMPT, np.int32), WeightVersion(1, 0)
    validate_sample(found, prompt, SampleLimits(vocabulary=100), identity="", newest=newest)


@pytest.mark.parametrize("code", INVALID)
def test_what_cannot_be_trained_is_refused(code: str) -> None:
    accept(changed("behavior_logprobs", 3, -2))
    sent, message = INVALID[code]
    with pytest.raises(FrameError, match=message):
        accept(sent)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Trajectory, list[tuple[list[int], list[int], bool]]]:
    """An episode, with each turn's whole context and what it sampled, kept apart from the code under test."""
    turns: list[tuple[list[int], list[int], AgentCall]] = []
    whole: list[tuple[list[int], list[int], bool]] = []
    tokens = st.lists(st.integers(0, 99), max_size=3)
    for number in range(draw(st.integers(1, 8))):
        after = draw(st.integers(-1, number - 1))
        before = PROMPT if after < 0 else whole[after][0] + whole[after][1]
        keeps = draw(st.sampled_from([len(before), draw(st.integers(0, len(before)))]))
        read, sampled = draw(tokens) or [5] * (keeps == 0), [100 + 10 * number, *draw(tokens)]
        is_main = number == 0 or draw(st.integers(0, 4)) > 0
        turns.append((read, sampled, AgentCall(after, keeps, role="main" if is_main else "auxiliary")))
        whole.append((before[:keeps] + read, sampled, is_main))
    return episode(turns), whole


@given(trees())
def test_each_sampled_token_is_trained_once_after_what_the_model_had_read(
    made: tuple[Trajectory, list[tuple[list[int], list[int], bool]]],
) -> None:
    sent, whole = made
    trajectory = decode_trajectory(encode_trajectory(sent))
    found = []
    for row in rows_of(trajectory):
        tokens = row.token_ids.tolist()
        assert trajectory.response_tokens[row.positions].tolist() == tokens[row.context_length :]
        for place, position in enumerate(row.positions.tolist(), row.context_length):
            if trajectory.loss_mask[position]:
                found.append((position, tuple(tokens[:place]), tokens[place]))
    expected = []
    for turn, (context, sampled, is_main) in zip(trajectory.turns, whole, strict=True):
        for number, token in enumerate(sampled if is_main else ()):
            expected.append((turn.start + number, (*context, *sampled[:number]), token))
    assert sorted(found) == sorted(expected)

"""A session's calls: tokens are never written anew, repeated calls get recorded answers, and what was not seen is not
trained."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headway.broker.errors import HeadwayError
from headway.broker.schema import WeightVersion
from headway.broker.wire.codec import decode_segment, decode_trajectory, encode_segment, encode_trajectory
from headway.broker.wire.rows import rows_of
from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, SessionEndedError
from headway.rollout_workers.agents.conversation import FormatError, Message, Tool
from headway.rollout_workers.config import AgentConfig

from .sessions import END, LEASE, Attempt, Engine, said, tokens, user

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def rows(attempt: Attempt) -> list[tuple[str, str]]:
    """The rows that are trained, as text: (context, the rest)."""
    attempt.session.settle()
    trajectory = attempt.recorder.to_trajectory(LEASE, {}, 1.0, "w")
    trajectory = decode_trajectory(encode_trajectory(trajectory))
    found = []
    for row in rows_of(trajectory):
        text = "".join(map(chr, row.token_ids.tolist())).replace(chr(END), "$")
        found.append((text[: row.context_length], text[row.context_length :]))
    return found


async def test_the_next_turn_goes_on_with_the_sampled_tokens() -> None:
    engine = Engine("one", "two")
    attempt = Attempt(engine)
    first = user("hi")
    answer = await attempt.session.chat(first)
    assert (answer.message["content"], answer.finish_reason) == ("one", "stop")
    assert answer.prompt_token_ids == tokens("<u>hi<a>")
    second = await attempt.session.chat(
        ChatCall(messages=said(first, answer.message, {"role": "user", "content": "?"}))
    )
    assert second.prompt_token_ids == [*answer.prompt_token_ids, *answer.token_ids, *tokens("<u>?<a>")]
    assert engine.asked[1].prompt_tokens == second.prompt_token_ids
    assert rows(attempt) == [("<u>hi<a>", "one$<u>?<a>two$")]


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": " one\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "one"}], "refusal": None},
        {"role": "assistant", "content": "one", "reasoning_content": "dropped or added"},
    ],
)
async def test_a_client_may_repeat_an_answer_in_its_own_words(echo: dict[str, Any]) -> None:
    attempt = Attempt(Engine("one", "two"))
    first = user("hi")
    await attempt.session.chat(first)
    await attempt.session.chat(ChatCall(messages=said(first, echo, {"role": "user", "content": "?"})))
    assert rows(attempt) == [("<u>hi<a>", "one$<u>?<a>two$")]
    assert attempt.session.counts["forks"] == 0


async def test_a_rewritten_history_is_a_branch_of_what_it_says() -> None:
    attempt = Attempt(Engine("one", "two"))
    first = user("hi")
    await attempt.session.chat(first)
    rewritten = {"role": "assistant", "content": "won"}
    await attempt.session.chat(ChatCall(messages=said(first, rewritten, {"role": "user", "content": "?"})))
    assert rows(attempt) == [("<u>hi<a>", "one$"), ("<u>hi<a>won<u>?<a>", "two$")]
    assert attempt.session.counts["forks"] == 1


async def test_an_answer_without_exact_continuation_is_a_branch() -> None:
    attempt = Attempt(Engine("one", "two"))
    first = user("hi")
    answer = await attempt.session.chat(first)
    attempt.format.can_bridge = False
    await attempt.session.chat(ChatCall(messages=said(first, answer.message, {"role": "user", "content": "?"})))
    assert len(rows(attempt)) == 2
    assert (attempt.session.counts["forks"], attempt.session.counts["unbridged"]) == (1, 1)


async def test_agents_may_keep_tokens_themselves() -> None:
    attempt = Attempt(Engine("one", "two"))
    answer = await attempt.session.chat(ChatCall(prompt_token_ids=tokens("abc")))
    whole = [*tokens("abc"), *answer.token_ids, *tokens("d")]
    await attempt.session.chat(ChatCall(prompt_token_ids=whole))
    await attempt.session.chat(ChatCall(prompt_token_ids=tokens("abX")))
    assert rows(attempt) == [("abc", "one$dtwo$"), ("abX", "ok$")]


@pytest.mark.parametrize("token", [1000, -1, 1 << 40])
async def test_tokens_that_the_model_does_not_have_are_refused(token: int) -> None:
    engine = Engine("one")
    attempt = Attempt(engine)
    with pytest.raises(CallRefusedError, match=f"token id {token} is none of the model's 1000"):
        await attempt.session.chat(ChatCall(prompt_token_ids=[1, token, 2]))
    assert (engine.asked, attempt.intended, attempt.session.failure.done()) == ([], [], False)
    await attempt.session.chat(ChatCall(prompt_token_ids=[999]))


async def test_tool_calls_have_ids_that_a_repeated_turn_has_too() -> None:
    first = Attempt(Engine("!add 1 2"))
    call = ChatCall(messages=[{"role": "user", "content": "1+2"}], tools=[TOOL])
    answer = await first.session.chat(call)
    (made,) = answer.message["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": "1 2"}
    assert answer.finish_reason == "tool_calls"
    again = Attempt(Engine(), *first.segments)
    assert (await again.session.chat(call)).message == answer.message


async def test_a_turn_is_kept_whose_arguments_have_half_of_a_surrogate_pair() -> None:
    attempt = Attempt(Engine(r'!add {"a": "\ud83d"}'))
    call = user("Go.")
    answer = await attempt.session.chat(call)
    await attempt.session.chat(ChatCall(messages=said(call, answer.message, {"role": "tool", "content": "no"})))
    assert len(rows(attempt)) == 1


async def test_the_same_call_asks_for_another_answer_unless_it_is_a_retry() -> None:
    engine = Engine("one", "two", "three")
    attempt = Attempt(engine)
    call = user("hi")
    first = await attempt.session.chat(call)
    assert (await attempt.session.chat(call)).message["content"] == "two"
    retried = await attempt.session.chat(ChatCall(messages=call.messages, is_retry=True))
    assert retried.message["content"] == "two"
    attempt.session.note_lost(first)
    assert (await attempt.session.chat(call)).token_ids == first.token_ids
    assert len(engine.asked) == 2


async def test_a_call_is_named_by_its_clients_key() -> None:
    engine = Engine("one", "two", "three")
    attempt = Attempt(engine)
    asked = [ChatCall(messages=user("hi").messages, key=key) for key in ("a", "b", "a", "b")]
    answers = [(await attempt.session.chat(call)).message["content"] for call in asked]
    assert answers == ["one", "two", "one", "two"]
    with pytest.raises(CallRefusedError, match="names another call"):
        await attempt.session.chat(ChatCall(messages=user("ho").messages, key="a"))
    assert len(engine.asked) == 2


async def test_parallel_calls_that_ask_the_same_have_answers_of_their_own() -> None:
    engine = Engine("one", "two")
    attempt = Attempt(engine)
    answers = await asyncio.gather(attempt.session.chat(user("hi")), attempt.session.chat(user("hi")))
    assert sorted(answer.message["content"] for answer in answers) == ["one", "two"]
    assert sorted(rows(attempt)) == [("<u>hi<a>", "one$"), ("<u>hi<a>", "two$")]


async def test_a_client_that_went_away_gets_the_answer_when_it_comes_back() -> None:
    engine = Engine("one", "two")
    engine.may_answer.clear()
    attempt = Attempt(engine)
    lost = asyncio.create_task(attempt.session.chat(user("hi")))
    while not engine.asked:  # noqa: ASYNC110 - the engine announces nothing
        await asyncio.sleep(0)
    lost.cancel()
    await asyncio.wait([lost])
    again = asyncio.create_task(attempt.session.chat(user("hi")))
    await asyncio.sleep(0)
    engine.may_answer.set()
    assert (await again).message["content"] == "one"
    assert len(engine.asked) == 1


async def test_an_answer_is_kept_before_it_is_told() -> None:
    is_kept, may_keep = asyncio.Event(), asyncio.Event()

    async def keep() -> bool:
        is_kept.set()
        return await may_keep.wait()

    attempt = Attempt(Engine("one"), keep=keep)
    answering = asyncio.create_task(attempt.session.chat(user("hi")))
    await is_kept.wait()
    done, _ = await asyncio.wait([answering], timeout=0.05)
    assert not done
    may_keep.set()
    assert (await answering).message["content"] == "one"


async def test_a_call_is_durable_before_it_is_sampled() -> None:
    engine = Engine("one", "two")
    attempt = Attempt(engine)
    first, second = user("hi"), user("ho")
    await attempt.session.chat(first)
    assert attempt.intended == [([first.digest], 0)]
    await asyncio.gather(*(attempt.session.chat(one) for one in (first, second)))
    durable = {digest for calls, asked in attempt.intended[1:] for digest in calls if asked < 3}
    assert durable == {first.digest, second.digest}


async def test_a_call_of_an_attempt_that_lost_its_lease_is_not_sampled() -> None:
    engine = Engine()
    attempt = Attempt(engine)
    attempt.left = None
    for _ in range(2):
        with pytest.raises(SessionEndedError):
            await attempt.session.chat(user("hi"))
    assert not engine.asked


async def test_an_answer_of_an_attempt_that_lost_its_lease_is_not_told() -> None:
    async def keep() -> bool:
        return False

    attempt = Attempt(Engine(), keep=keep)
    with pytest.raises(SessionEndedError):
        await attempt.session.chat(user("hi"))
    attempt.session.settle()
    assert attempt.recorder.newest_main() is None


async def test_calls_that_were_lost_with_their_worker_are_counted() -> None:
    engine = Engine("one")
    before = Attempt(engine)
    first, second = user("hi"), user("ho")
    await before.session.chat(first)
    after = Attempt(engine, *before.segments)
    after.left = [first.digest, second.digest]
    await after.session.chat(first)
    assert not after.intended
    await after.session.chat(second)
    assert after.session.counts["lost_calls"] == 1


async def test_another_attempt_repeats_what_was_kept_and_goes_on() -> None:
    first = Attempt(Engine("one", "two"))
    call = user("hi")
    answer = await first.session.chat(call)
    second = ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"}))
    await first.session.chat(second)
    segments = [decode_segment(encode_segment(one)) for one in first.segments]
    engine = Engine("three")
    engine.version = WeightVersion(1, 3)
    heir = Attempt(engine, *segments)
    assert (await heir.session.chat(call)).token_ids == answer.token_ids
    repeated = await heir.session.chat(second)
    third = ChatCall(messages=said(second, repeated.message, {"role": "user", "content": "!"}))
    assert (await heir.session.chat(third)).message["content"] == "three"
    assert len(engine.asked) == 1
    assert heir.session.counts["resumed"] == 2
    assert rows(heir) == [("<u>hi<a>", "one$<u>?<a>two$<u>!<a>three$")]
    trajectory = heir.recorder.to_trajectory(LEASE, {}, 1.0, "w")
    assert [(span.version.step, span.end) for span in trajectory.spans] == [(0, 23), (3, len(trajectory.loss_mask))]


async def test_a_reward_is_of_the_turn_that_the_agent_got_last() -> None:
    first = Attempt(Engine("one", "two"))
    call = user("hi")
    answer = await first.session.chat(call)
    await first.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    heir = Attempt(Engine(), *first.segments)
    await heir.session.chat(call)
    heir.session.give_reward(1.0)
    await heir.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    heir.session.settle()
    trajectory = heir.recorder.to_trajectory(LEASE, {}, 0.0, "w")
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]


async def test_parallel_calls_share_turns_and_tokens() -> None:
    engine = Engine("one", "two", "three")
    attempt = Attempt(engine, config=AgentConfig(kind="test", max_turns=2), most_tokens=40)
    answers = await asyncio.gather(*(attempt.session.chat(user("hi")) for _ in range(3)))
    assert sorted(len(answer.token_ids) for answer in answers) == [0, 4, 4]
    assert len({request.request_id for request in engine.asked}) == 2


async def test_an_outage_of_the_broker_is_no_timeout_of_the_model() -> None:
    may_keep = asyncio.Event()
    config = AgentConfig(kind="test", turn_s=0.05)
    attempt = Attempt(Engine("one"), config=config, keep=may_keep.wait)
    answering = asyncio.create_task(attempt.session.chat(user("hi")))
    await asyncio.sleep(0.2)
    again = asyncio.create_task(attempt.session.chat(user("hi")))
    await asyncio.sleep(0)
    may_keep.set()
    assert (await answering).message["content"] == "one"
    assert (await again).message["content"] == "ok", "what is not durable yet is no answer to another call"


async def test_an_agent_that_is_run_again_repeats_its_turns_without_their_rewards() -> None:
    engine = Engine("one", "two")
    attempt = Attempt(engine)
    call = user("hi")
    answer = await attempt.session.chat(call)
    attempt.session.give_reward(1.0)
    attempt.session.begin_again()
    assert (await attempt.session.chat(call)).token_ids == answer.token_ids
    attempt.session.give_reward(1.0)
    await attempt.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    assert len(engine.asked) == 2
    assert rows(attempt) == [("<u>hi<a>", "one$<u>?<a>two$")]
    assert attempt.recorder.earned == 1.0


async def test_an_agent_that_cannot_repeat_its_turns_gets_new_answers() -> None:
    attempt = Attempt(Engine("one", "two", "three"))
    call = user("hi")
    await attempt.session.chat(call)
    attempt.session.give_reward(1.0)
    attempt.session.begin_anew()
    attempt.session.begin_anew()
    answer = await attempt.session.chat(call)
    assert answer.message["content"] == "two"
    following = ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"}))
    assert (await attempt.session.chat(following)).message["content"] == "three"
    attempt.session.settle()
    assert rows(attempt) == [("<u>hi<a>", "two$<u>?<a>three$")]
    assert (attempt.session.counts["restarted"], attempt.session.counts["unseen_turns"]) == (2, 1)
    assert attempt.recorder.earned == 0.0


@pytest.mark.parametrize("is_run_again", [True, False])
async def test_a_turn_whose_call_was_given_up_before_it_was_durable_is_not_trained(is_run_again: bool) -> None:
    keeping, may_keep = asyncio.Event(), asyncio.Event()

    async def keep() -> bool:
        keeping.set()
        return await may_keep.wait()

    may_keep.set()
    attempt = Attempt(Engine("one", "two", "three"), keep=keep)
    call = user("hi")
    answer = await attempt.session.chat(call)
    following = ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"}))
    keeping.clear()
    may_keep.clear()
    lost = asyncio.create_task(attempt.session.chat(following))
    await keeping.wait()
    if is_run_again:
        attempt.session.begin_again()
        may_keep.set()
        assert (await attempt.session.chat(call)).token_ids == answer.token_ids
        await attempt.session.chat(following)
    attempt.session.settle()
    assert rows(attempt) == [("<u>hi<a>", "one$<u>?<a>three$" if is_run_again else "one$")]
    with pytest.raises(SessionEndedError):
        await lost


async def test_turns_that_another_attempt_does_not_repeat_are_not_trained() -> None:
    first = Attempt(Engine("one", "two"))
    call = user("hi")
    answer = await first.session.chat(call)
    await first.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    heir = Attempt(Engine("three"), *first.segments)
    assert (await heir.session.chat(call)).message["content"] == "one"
    await heir.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "other"})))
    assert rows(heir) == [("<u>hi<a>", "one$<u>other<a>three$")]
    assert heir.session.counts["unseen_turns"] == 1
    trajectory = heir.recorder.to_trajectory(LEASE, {}, 1.0, "w")
    assert not trajectory.behavior_logprobs[trajectory.loss_mask == 0].any()


async def test_an_agent_may_go_on_at_another_attempt_without_asking_again() -> None:
    first = Attempt(Engine("one", "two"))
    call = user("hi")
    answer = await first.session.chat(call)
    second = ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"}))
    last = await first.session.chat(second)
    engine = Engine("three")
    heir = Attempt(engine, *first.segments)
    await heir.session.chat(ChatCall(messages=said(second, last.message, {"role": "user", "content": "!"})))
    assert len(engine.asked) == 1
    assert rows(heir) == [("<u>hi<a>", "one$<u>?<a>two$<u>!<a>three$")]


async def test_an_answer_that_nobody_got_is_not_trained() -> None:
    attempt = Attempt(Engine("one", "two"))
    await attempt.session.chat(user("hi"))
    attempt.session.note_lost(await attempt.session.chat(user("ho")))
    assert rows(attempt) == [("<u>hi<a>", "one$")]


async def test_calls_that_run_when_the_agent_ends_are_not_recorded() -> None:
    engine = Engine("one", "two")
    attempt = Attempt(engine)
    await attempt.session.chat(user("hi"))
    engine.may_answer.clear()
    dangling = asyncio.create_task(attempt.session.chat(user("ho")))
    while len(engine.asked) < 2:  # noqa: ASYNC110 - the engine announces nothing
        await asyncio.sleep(0)
    assert rows(attempt) == [("<u>hi<a>", "one$")]
    with pytest.raises(SessionEndedError):
        await dangling
    with pytest.raises(SessionEndedError):
        await attempt.session.chat(user("hi"))


async def test_an_episode_has_so_many_turns() -> None:
    attempt = Attempt(Engine(), config=AgentConfig(kind="test", max_turns=2))
    answers = [await attempt.session.chat(user(str(number))) for number in range(3)]
    assert [len(answer.token_ids) for answer in answers] == [3, 3, 0]
    assert answers[2].finish_reason == "length"
    assert len(rows(attempt)) == 2


async def test_an_episode_has_so_many_tokens() -> None:
    engine = Engine("long" * 100, "x")
    attempt = Attempt(engine, most_tokens=40)
    first = await attempt.session.chat(user("hi"))
    assert (first.finish_reason, len(first.token_ids)) == ("length", 32)
    assert not (await attempt.session.chat(user("ho"))).token_ids
    assert attempt.session.counts["over_budget"] == 1
    assert attempt.recorder.to_trajectory(LEASE, {}, 1.0, "w").finish_reason == "length"


async def test_the_shortest_of_all_bounds_counts() -> None:
    attempt = Attempt(Engine("long" * 100, "long" * 100), config=AgentConfig(kind="test", max_turn_tokens=7))
    assert len((await attempt.session.chat(user("hi"))).token_ids) == 7
    short = await attempt.session.chat(ChatCall(messages=user("ho").messages, max_tokens=3))
    assert (len(short.token_ids), short.finish_reason) == (3, "length")


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 4}, {"seed": 3}])
async def test_a_call_that_wants_other_sampling_is_refused(asked: dict[str, Any]) -> None:
    engine = Engine("one")
    attempt = Attempt(engine)
    with pytest.raises(CallRefusedError, match=r"agent\.ignore_sampling=true"):
        await attempt.session.chat(ChatCall(messages=user("hi").messages, **asked))
    same = ChatCall(messages=user("hi").messages, temperature=1.0, top_p=1.0, top_k=-1)
    assert (await attempt.session.chat(same)).message["content"] == "one"


async def test_a_conversation_that_the_format_cannot_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        raise FormatError("Message 0 is a picture.")

    attempt = Attempt(Engine())
    with monkeypatch.context() as patch:
        patch.setattr(attempt.format, "render", fail)
        with pytest.raises(CallRefusedError, match="picture"):
            await attempt.session.chat(user("see"))
        with pytest.raises(CallRefusedError, match="picture"):
            attempt.session.count_tokens(user("see"))
    assert (await attempt.session.chat(user("hi"))).message["content"] == "ok"
    assert not attempt.session.failure.done()


async def test_titles_and_summaries_are_answered_and_not_trained() -> None:
    attempt = Attempt(Engine("one", "a title"))
    system = {"role": "system", "content": "work"}
    await attempt.session.chat(user("hi", system))
    title = await attempt.session.chat(user("hi", {"role": "system", "content": "write a title"}))
    assert title.message["content"] == "a title"
    assert rows(attempt) == [("<s>work<u>hi<a>", "one$")]
    assert attempt.session.counts["auxiliary_turns"] == 1


async def test_a_subagent_has_tools_and_is_trained() -> None:
    attempt = Attempt(Engine("one", "two"))
    await attempt.session.chat(user("hi", {"role": "system", "content": "work"}))
    other = [{"role": "system", "content": "search"}, {"role": "user", "content": "it"}]
    await attempt.session.chat(ChatCall(messages=other, tools=[TOOL]))
    assert len(rows(attempt)) == 2


@pytest.mark.parametrize("logprob", [-9999.0, -12345.0, float("nan"), 0.5])
async def test_a_logprob_that_is_none_ends_the_attempt(logprob: float) -> None:
    engine = Engine("one")
    engine.logprob = logprob
    attempt = Attempt(engine)
    with pytest.raises(SessionEndedError):
        await attempt.session.chat(user("hi"))
    with pytest.raises(HeadwayError, match="logprob"):
        attempt.session.failure.result()


async def test_rewards_of_turns_add_up_to_the_episodes() -> None:
    attempt = Attempt(Engine("one", "two"))
    with pytest.raises(CallRefusedError):
        attempt.session.give_reward(1.0)
    for number in range(2):
        await attempt.session.chat(user(str(number)))
        attempt.session.give_reward(0.25 + number)
    with pytest.raises(CallRefusedError):
        attempt.session.give_reward(float("nan"))
    attempt.session.settle()
    trajectory = attempt.recorder.to_trajectory(LEASE, {}, 0.5, "w")
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.75]
    assert trajectory.reward == 2.0
    assert np.array_equal(trajectory.prompt_tokens, [900, 901])


async def test_the_agent_waits_for_tools_while_it_asks_nothing() -> None:
    engine = Engine("one")
    engine.may_answer.clear()
    attempt = Attempt(engine)
    seen = [attempt.session.waits_for_tools]  # it has not called yet, and will
    calling = asyncio.create_task(attempt.session.chat(user("hi")))
    while not engine.asked:  # noqa: ASYNC110 - the engine announces nothing
        await asyncio.sleep(0)
    seen.append(attempt.session.waits_for_tools)
    engine.may_answer.set()
    await calling
    seen.append(attempt.session.waits_for_tools)
    attempt.session.settle()
    seen.append(attempt.session.waits_for_tools)
    assert seen == [False, False, True, False]


async def test_a_call_that_asks_the_same_has_no_answer_that_goes_to_another_one() -> None:
    engine = Engine("one", "two")
    kept: list[asyncio.Task[object]] = []

    async def keep() -> bool:
        """As a turn becomes durable, the same call comes in: before the first one's caller is woken."""
        if not kept:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: kept.append(asyncio.create_task(attempt.session.chat(user("hi")))))
            kept.append(loop.create_task(asyncio.sleep(0)))
        return True

    attempt = Attempt(engine, keep=keep)
    answer = await attempt.session.chat(user("hi"))
    other = await kept[1]
    assert answer.message["content"] == "one"
    assert isinstance(other, ChatAnswer)
    assert other.message["content"] == "two"
    assert attempt.session.counts["repeated"] == 0


async def test_a_turn_that_becomes_durable_takes_its_tokens_once() -> None:
    may_keep, is_kept = asyncio.Event(), asyncio.Event()

    async def keep() -> bool:
        is_kept.set()
        return await may_keep.wait()

    attempt = Attempt(Engine("x" * 19, "y" * 50), most_tokens=60, keep=keep)
    first = asyncio.create_task(attempt.session.chat(replace(user("a"), max_tokens=20)))
    await is_kept.wait()
    second = asyncio.create_task(attempt.session.chat(user("b")))
    may_keep.set()
    await first
    assert len((await second).token_ids) == 60 - 20 - len("<u>a<a>" + "b<a>")


def handed_on(first: Attempt, engine: Engine) -> Attempt:
    """Return the attempt of another worker, whose agent is from outside and lives on."""
    return Attempt(engine, *first.segments, end=lambda reward, measures: None)


async def test_a_living_agent_is_trained_on_turns_that_it_had_when_its_worker_was_lost() -> None:
    first = Attempt(Engine("one", "two"), end=lambda reward, measures: None)
    call = user("hi")
    answer = await first.session.chat(call)
    await first.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    assert rows(handed_on(first, Engine())) == [("<u>hi<a>", "one$<u>?<a>two$")]


async def test_a_living_agent_is_not_trained_on_a_turn_that_it_gave_up() -> None:
    first = Attempt(Engine("one", "never told", "two"), end=lambda reward, measures: None)
    call = user("hi")
    answer = await first.session.chat(call)

    def second(text: str) -> ChatCall:
        return ChatCall(messages=said(call, answer.message, {"role": "user", "content": text}))

    first.session.note_lost(await first.session.chat(second("?")))
    last = await first.session.chat(second("!"))
    heir = handed_on(first, Engine("three"))
    await heir.session.chat(ChatCall(messages=said(second("!"), last.message, {"role": "user", "content": "+"})))
    assert rows(heir) == [("<u>hi<a>", "one$<u>!<a>two$<u>+<a>three$")]


async def test_a_living_agent_is_trained_on_what_it_asked_beside_its_conversation() -> None:
    before = Attempt(Engine("aside"), end=lambda reward, measures: None)
    await before.session.chat(user("beside"))
    call, first = user("hi"), handed_on(before, Engine("one"))
    answer = await first.session.chat(call)
    heir = handed_on(first, Engine("two"))
    second = ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"}))
    last = await heir.session.chat(second)
    third = handed_on(heir, Engine("three"))
    await third.session.chat(ChatCall(messages=said(second, last.message, {"role": "user", "content": "!"})))
    wanted = [("<u>beside<a>", "aside$"), ("<u>hi<a>", "one$<u>?<a>two$<u>!<a>three$")]
    assert [rows(third), rows(heir)] == [wanted, [wanted[0], ("<u>hi<a>", "one$<u>?<a>two$")]]


async def test_a_title_that_a_living_agent_asks_for_first_at_another_worker_is_not_trained() -> None:
    system: list[Message] = [{"role": "system", "content": "play"}]
    first = Attempt(Engine("one"), end=lambda reward, measures: None)
    call = user("hi", *system)
    answer = await first.session.chat(call)
    heir = handed_on(first, Engine("title", "two"))
    await heir.session.chat(user("hi", {"role": "system", "content": "name it"}))
    await heir.session.chat(ChatCall(messages=said(call, answer.message, {"role": "user", "content": "?"})))
    assert rows(heir) == [("<s>play<u>hi<a>", "one$<u>?<a>two$")]

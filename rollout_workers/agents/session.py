"""One attempt at an episode: calls are answered by the engine, from the record, or by a refusal.

A call is answered from the record where this attempt repeats what an earlier one was answered: after a worker was lost
the agent is run again, and its calls get the recorded answers until it asks something new. So does a client that lost
an answer. Any other call is sampled: after the tokens of the turn that its conversation goes on from, if these can be
continued exactly, else as a branch.
"""

import asyncio
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from headway.broker.errors import HeadwayError
from headway.broker.schema import AgentCall
from headway.broker.wire.checks import MAX_TOKEN_ID
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.samples.episode import PlayedSample
from headway.rollout_workers.samples.recorder import Recorder

from .answers import answer_of, conversation_after, spent_answer, turn_number
from .budget import EpisodeBudget
from .calls import CallRefusedError, ChatAnswer, ChatCall, SessionEndedError
from .conversation import ChatFormat, FormatError, ParsedAnswer, beside, content_of
from .digests import ConversationDigests
from .tree import EpisodeRecorder


@dataclass(frozen=True)
class _Context:
    """What a call has the model read: the first `keeps` tokens of the row of turn `after`, and then `read`."""

    after: int
    keeps: int
    read: list[int]
    is_fork: bool
    """Whether it breaks off from an earlier conversation, or goes on from none."""
    whole: list[int]
    """All that the model reads."""


@dataclass
class _Running:
    task: asyncio.Task[ChatAnswer]
    keys: set[str]
    waiting: int = 0
    """Callers that wait for the answer."""


class EpisodeSession:
    """Speaks to one agent: an implementation of `calls.Session`."""

    def __init__(
        self,
        sample: PlayedSample,
        recorder: EpisodeRecorder,
        chat_format: ChatFormat,
        config: AgentConfig,
        *,
        model: str,
        text_of: Callable[[list[int]], str],
        vocabulary: int = MAX_TOKEN_ID + 1,
        trained_temperature: float | None = None,
        attempt: str = "",
        end: Callable[[float | None, dict[str, float]], None] | None = None,
    ) -> None:
        """`vocabulary`: the number of the model's tokens. Calls may ask for the `trained_temperature` also where an
        evaluation samples at another one, which they get. `end` takes the outcome of an agent that no worker started,
        and `attempt` names the attempt that began its episode; None: the agent returns it."""
        self.called = asyncio.Event()
        """Set by the first call."""
        self.model = model
        self.text_of = text_of
        self.counts: Counter[str] = Counter()
        """Calls by what became of them, forks, and tokens that were computed for forks alone."""
        self.waited_s = 0.0
        """Seconds in which the agent asked nothing: its tools worked, or itself."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises why the episode cannot go on, of the engine's side; never done where it can."""
        self._attempt, self._finish = attempt, end
        self._vocabulary, self._trained_temperature = vocabulary, trained_temperature
        self._sample = sample
        self._recorder = recorder
        self._format = chat_format
        self._config = config
        self._recorded: dict[str, list[int]] = {}
        """The turns that answer a call, by its digest."""
        self._unseen = set(range(recorder.resumed))
        """The turns that the agent does not have: of earlier attempts, or lost on their way. They answer their calls
        again."""
        self._on_their_way = set[int]()
        """Turns whose answers go to callers that wait for them: no further call gets these."""
        self._noted = set[int]()
        """Turns of which it is noted already that the agent has them, and those from which they went on."""
        self._digests = ConversationDigests()
        self._running: dict[str, list[_Running]] = {}
        self._keys: dict[str, int] = {}
        """Turns by the client's own names of their calls."""
        self._turns_of: dict[str, list[int]] = {}
        """The turns that end a conversation, by the conversation's digest."""
        self._rewarded: int | None = None
        """The main turn whose answer the agent got last."""
        self._main_system: str | None = None
        self._keeping, self._intending = asyncio.Lock(), asyncio.Lock()
        self._intended = set[str]()
        """The digests of calls that run, as they are durable."""
        self._budget = EpisodeBudget(sample, recorder, config)
        self._asked: Counter[str] = Counter()
        """Calls that were sampled, by their digest."""
        self._idle_since = time.monotonic()
        self._is_over = self._is_run_again = False
        for number in range(recorder.resumed):
            turn = recorder.turns[number]
            assert turn.call is not None
            self._recorded.setdefault(turn.call.digest, []).append(number)
            self._asked[turn.call.digest] += 1
            self._turns_of.setdefault(turn.call.conversation, []).append(number)
        self._turns_of.pop("", None)

    @property
    def waits_for_tools(self) -> bool:
        """Whether the agent has called before, and no call of it runs."""
        return self.called.is_set() and not self._running and not self._is_over

    @property
    def running_requests(self) -> int:
        """The calls that are being answered. Any thread may ask."""
        return sum(map(len, list(self._running.values())))

    def end(self) -> None:
        """Refuse all further calls, and cancel those that run. Idempotent."""
        self._is_over = True
        self._cancel()

    def _cancel(self) -> None:
        for running in self._running.values():
            for one in running:
                if one.task is not asyncio.current_task():
                    one.task.cancel()

    async def chat(self, call: ChatCall) -> ChatAnswer:
        """See Session."""
        self._check_open()
        run = self._sample.request
        if call.temperature is not None and call.temperature == self._trained_temperature != run.temperature:
            self.counts["replaced_temperature"] += 1  # in an evaluation, of which no program can know
            call = replace(call, temperature=None)
        call.check_sampling(temperature=run.temperature, top_p=run.top_p, top_k=run.top_k, seed=run.seed)
        call.check_tokens(self._vocabulary)
        call = self._named(replace(call, role=self._role(call)))
        if (known := self._known(call)) is not None:
            self._note_answered(call, known)
            return known
        running = self._joined(call)
        running.waiting += 1
        try:
            answer = await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled():
                raise SessionEndedError("this episode has ended, or another worker plays it now") from None
            raise
        finally:
            running.waiting -= 1
            self._arrived(running)
        self._note_answered(call, answer)
        return answer

    def _arrived(self, running: _Running) -> None:
        """Note that nobody waits for an answer any more, if that is so."""
        task = running.task
        if not running.waiting and task.done() and not task.cancelled() and task.exception() is None:
            self._on_their_way.discard(turn_number(task.result().id))

    def _named(self, call: ChatCall) -> ChatCall:
        """Return a call of whose conversation only new messages were digested."""
        vars(call)["links"] = self._digests.links(call.messages, call.tools)
        return call

    def _note_answered(self, call: ChatCall, answer: ChatAnswer) -> None:
        self._unseen.discard(turn_number(answer.id))
        if call.role == "main" and answer.token_ids:
            self._rewarded = turn_number(answer.id)

    def note_lost(self, answer: ChatAnswer) -> None:
        """See Session."""
        if answer.token_ids:
            self._unseen.add(turn_number(answer.id))
            self._noted.clear()

    def count_tokens(self, call: ChatCall) -> int:
        """See Session."""
        self._check_open()
        if call.prompt_token_ids is not None:
            return len(call.prompt_token_ids)
        try:
            return len(self._format.render(call.messages, call.tools))
        except FormatError as error:
            raise CallRefusedError(str(error)) from error

    def give_reward(self, reward: float) -> None:
        """See Session."""
        self._check_open()
        if self._rewarded is None or not math.isfinite(reward):
            raise CallRefusedError(f"a reward of {reward} for no turn, or no finite number")
        if self._finish is not None:  # another worker that takes the episode over would not have it
            raise CallRefusedError("an agent from outside gives its whole reward with /finish")
        self._recorder.give_reward(self._rewarded, reward)

    async def finish(self, reward: float | None, measures: dict[str, float]) -> None:
        """See Session."""
        if self._finish is None:
            raise CallRefusedError("this episode ends when its agent returns; return the reward instead")
        self._finish(reward, measures)

    def begin_again(self, attempt: str = "") -> None:
        """Note that the agent is run again: it gets all answers from the record that it asks for once more. `attempt`
        names this one of another agent from outside."""
        self._cancel()
        self._running, self._keys = {}, {}
        self._attempt, self._is_run_again = attempt or self._attempt, True
        self._main_system = self._rewarded = None
        self._recorder.begin_again()
        self._unseen = {number for numbers in self._recorded.values() for number in numbers}
        self._noted.clear()

    def begin_anew(self) -> None:
        """Note that an agent is run again that cannot repeat what it did: it gets new answers, of as many tokens as are
        left, and those that it had are not trained."""
        self.begin_again()
        self._recorded, self._turns_of = {}, {}
        self._unseen = set(range(self._recorder.resumed))
        self.counts["restarted"] += 1

    def settle(self) -> None:
        """Note that the agent has ended: turns that it did not see are not trained. Idempotent."""
        self.end()
        unseen = self._left_out()
        if unseen:
            self.counts["unseen_turns"] += len(unseen)
            self._recorder.drop(unseen)
            self._unseen -= unseen

    @property
    def _lives_on(self) -> bool:
        """Whether the agent is from outside, and the one that an earlier worker had: it need not repeat its calls."""
        return self._finish is not None and not self._is_run_again and self._recorder.resumed > 0

    def _left_out(self) -> set[int]:
        """Return the turns that the agent does not have. One that lives on has the last answer of the worker before,
        unless it asks for it again: no record says of that one alone whether its client had given it up."""
        if not self._lives_on:
            return set(self._unseen)
        calls = [turn.call for turn in self._recorder.turns if turn.call is not None]
        resumed = self._recorder.resumed
        had = set(range(resumed)) - set(calls[resumed - 1].unseen)
        had |= {call.after for call in calls if call.keeps == self._recorder.row_length(call.after)}
        return self._unseen - had

    def _check_open(self) -> None:
        if self._is_over:
            raise SessionEndedError("this episode has ended, or another worker plays it now")

    def _joined(self, call: ChatCall) -> _Running:
        """Return the same call as it runs, where this one repeats it, else begin to sample an answer."""
        running = self._running.get(call.digest, [])
        is_named = call.is_retry or bool(call.key)
        for one in running:
            if not one.waiting or call.key in one.keys or (is_named and not call.key):
                self.counts["repeated"] += 1
                return one
        waited_s = self._begin()
        made = _Running(asyncio.create_task(self._sampled(call, waited_s)), {call.key} - {""})
        self._running.setdefault(call.digest, []).append(made)
        made.task.add_done_callback(lambda _: self._ended(call.digest, made))
        return made

    def _begin(self) -> float:
        """Note a call. Returns the seconds since the answer before, if no other call runs."""
        waited_s = 0.0 if self._running else time.monotonic() - self._idle_since
        self.waited_s += waited_s
        self.called.set()
        return waited_s

    def _ended(self, digest: str, running: _Running) -> None:
        beside = [one for one in self._running.pop(digest, []) if one is not running]
        if beside:
            self._running[digest] = beside
        else:
            self._intended.discard(digest)
        self._arrived(running)
        self._idle_since = time.monotonic()

    def _role(self, call: ChatCall) -> Any:
        """Return the role of a call: another system prompt than the first one's, without tools, is auxiliary, as agents
        ask for titles and summaries so."""
        system = "\n".join(content_of(one) for one in call.messages if one.get("role") == "system")
        if self._main_system is None and call.role == "main" and (not self._lives_on or self._goes_on(call)):
            self._main_system = system
        is_other = bool(call.messages) and system != self._main_system and bool(system) and not call.tools
        return "auxiliary" if is_other or call.role == "auxiliary" else "main"

    def _goes_on(self, call: ChatCall) -> bool:
        """Return whether a call's conversation has a recorded main turn."""
        links = self._digests.links(call.messages, call.tools)
        ended = (number for link in links for number in self._turns_of.get(link.said.hex(), ()))
        calls = (self._recorder.turns[number].call for number in ended)
        return any(made is not None and made.role == "main" for made in calls)

    def _known(self, call: ChatCall) -> ChatAnswer | None:
        """Return the recorded answer of a repeated call; None if the call is to be sampled."""
        recorded = self._recorded.get(call.digest, [])
        free = (number for number in recorded if number in self._unseen and number not in self._on_their_way)
        found = next(free, None)
        if found is None and call.key in self._keys:
            found = self._keys[call.key]
            if self._recorder.turn(found).call.digest != call.digest:
                raise CallRefusedError(f"the key {call.key!r} names another call; give each call a key of its own")
        if found is None and call.is_retry and recorded:
            found = recorded[-1]
        if found is None:
            return None
        self._begin()
        self._idle_since = time.monotonic()
        self.counts["resumed" if found < self._recorder.resumed else "repeated"] += 1
        self._unseen.discard(found)
        turn = self._recorder.turn(found)
        return answer_of(turn, self._format.parse(turn.token_ids, call.tools))

    async def _sampled(self, call: ChatCall, waited_s: float) -> ChatAnswer:
        try:
            await self._intend(call)
            return await self._turn(call, waited_s)
        except (CallRefusedError, SessionEndedError):
            raise
        except FormatError as error:
            raise CallRefusedError(str(error)) from error
        except HeadwayError as error:
            self._fail(error)
            raise SessionEndedError("the engine failed; the episode goes on elsewhere") from error

    async def _intend(self, call: ChatCall) -> None:
        """Have the broker know of a call before it is sampled. Calls of an attempt that has lost its lease end here."""
        async with self._intending:
            if call.digest in self._intended:
                return
            running = set(self._running)
            before = await self._sample.intend(sorted(running))
            if before is None:
                self.end()
                self._check_open()
            self._intended |= running & set(self._running)
            self.counts["lost_calls"] += sum(digest not in self._recorded for digest in set(before or ()))

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # whoever plays the episode may be gone
        self.end()

    async def _turn(self, call: ChatCall, waited_s: float) -> ChatAnswer:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._config.turn_s) as limit:
                context = await self._context(call)
                async with self._budget.reserved(
                    len(context.read), len(context.whole), call.max_tokens, self._unseen
                ) as longest:
                    if longest < 1:
                        self.counts["over_budget"] += 1
                        return spent_answer(context.whole)
                    turn = Recorder()
                    await self._sample.generate(self._request(call, context.whole, longest), turn)
                    parsed = self._format.parse(turn.tokens, call.tools)
                    number = self._record(call, context, turn, parsed, waited_s, time.monotonic() - began_s)
                limit.reschedule(None)  # to make it durable may take as long as the broker is away
                await self._keep(number)
                self._note_turn(call, context, turn, number)
        except TimeoutError:
            self.counts["turn_timeouts"] += 1
            raise CallRefusedError(f"the model gave no answer within agent.turn_s={self._config.turn_s:g} s") from None
        self._check_open()
        return answer_of(self._recorder.turn(number, context.whole), parsed)

    def _record(
        self,
        call: ChatCall,
        context: _Context,
        turn: Recorder,
        parsed: ParsedAnswer,
        waited_s: float,
        sampled_s: float,
    ) -> int:
        """Record a turn, which is not trained yet, and return its number."""
        made = AgentCall(
            after=context.after,
            keeps=context.keeps,
            digest=call.digest,
            attempt=self._attempt,
            conversation=conversation_after(call, parsed),
            role=call.role,
            finish_reason=turn.finished(),
            tool_calls=len(parsed.tool_calls),
            waited_s=waited_s,
            sampled_s=sampled_s,
            unseen=() if self._finish is None else tuple(sorted(self._left_out())),
        )
        number = self._recorder.add_turn(context.read, turn, made)
        self._recorder.drop({number})  # a call that is cancelled before it is durable is not answered
        return number

    async def _keep(self, number: int) -> None:
        """Return once a turn is durable, and may be trained. Where another worker has the lease, no answer is told."""
        async with self._keeping:
            if not await self._sample.keep():
                self.end()
                self._check_open()
        self._recorder.take_back(number)

    def _note_turn(self, call: ChatCall, context: _Context, turn: Recorder, number: int) -> None:
        """Note a turn that is durable: from now on it may be repeated."""
        self._recorded.setdefault(call.digest, []).append(number)
        self._unseen.add(number)
        self._on_their_way.add(number)
        if call.key:
            self._keys[call.key] = number
        made = self._recorder.turns[number].call
        assert made is not None
        if made.conversation:
            self._turns_of.setdefault(made.conversation, []).append(number)
        self._count(call, context, turn)

    def _count(self, call: ChatCall, context: _Context, turn: Recorder) -> None:
        self.counts["turns"] += 1
        self.counts["auxiliary_turns"] += call.role == "auxiliary"
        if context.is_fork and call.role == "main":
            self.counts["forks"] += 1
            self.counts["reread_tokens"] += len(context.read)
        self.counts["read_tokens"] += len(context.read)
        self.counts["sampled_tokens"] += len(turn.tokens)

    def _request(self, call: ChatCall, whole: list[int], longest: int) -> Any:
        """Return the request for an answer after `whole`. Its seed depends on what is asked and how often it was."""
        request = self._sample.request
        asked, self._asked[call.digest] = self._asked[call.digest], self._asked[call.digest] + 1
        seed = None if request.seed is None else zlib.crc32(f"{request.seed}:{call.digest}:{asked}".encode())
        return replace(
            request,
            request_id=f"{request.request_id}:{call.digest[:8]}:{asked}",
            prompt_tokens=whole,
            max_new_tokens=longest,
            stop_token_ids=sorted({*request.stop_token_ids, *self._format.stop_token_ids}),
            seed=seed,
            experts_from=None,
        )

    async def _context(self, call: ChatCall) -> _Context:
        """Return what the model reads. The tokens of a turn that the conversation goes on from are kept as they are."""
        if call.prompt_token_ids is not None:
            return self._beginning(call.prompt_token_ids)
        answers = [place for place, one in enumerate(call.messages) if one.get("role") == "assistant"]
        for place in reversed(answers):
            ended = self._turns_of.get(call.links[place + 1].said.hex())
            if not ended:
                continue
            after = max(ended, key=lambda number: (number not in self._unseen, number))
            row = self._recorder.row(after)
            new = call.messages[place + 1 :]
            read = await beside(new, self._format.bridge, row, new, call.tools)
            if read is not None:
                self._note_seen(after)
                return _Context(after, len(row), read, is_fork=place != answers[-1], whole=[*row, *read])
            self.counts["unbridged"] += 1
            break
        return self._beginning(await beside(call.messages, self._format.render, call.messages, call.tools))

    def _beginning(self, tokens: list[int]) -> _Context:
        """Return a context of these very tokens, with as many as possible from an earlier row."""
        after, keeps = self._recorder.longest_beginning(tokens, self._unseen)
        is_whole = after >= 0 and keeps == self._recorder.row_length(after)
        if is_whole:
            self._note_seen(after)
        is_fork = bool(self._recorder.turns) and not is_whole
        return _Context(after, keeps, list(tokens[keeps:]), is_fork, whole=tokens)

    def _note_seen(self, number: int) -> None:
        """Note that the agent has a turn, as it goes on from it, and the turns from which that one went on."""
        while number >= 0 and number not in self._noted:
            self._noted.add(number)
            self._unseen.discard(number)
            call = self._recorder.turns[number].call
            assert call is not None
            goes_on = call.after >= 0 and call.keeps == self._recorder.row_length(call.after)
            number = call.after if goes_on else -1

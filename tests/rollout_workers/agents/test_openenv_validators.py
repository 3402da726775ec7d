"""OpenEnv's own validators find nothing fatal in a thousand random episodes as `headway trajectories` exports them.

The episodes are those of `test_audit`, with a tokenizer, its chat template, and a model that calls tools: one at a
time, several at once, with broken JSON, cut in the middle. `make test-agents` runs these tests.
"""

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from headway.broker.schema import Group, Trajectory, TrajectoryId
from headway.deploy.cli.main import cli
from headway.learner.experience.log import ExperienceLog
from headway.rollout_workers.agents.calls import ChatAnswer, ChatCall

from .chat_models import LOOKUP, Opened, opened_in
from .sessions import LEASE, PROMPT
from .test_audit import RecordingEngine, WanderingAgent, played

capture: Any = pytest.importorskip("openenv.core.harness.capture", reason="OpenEnv is not installed: make test-agents")
contract: Any = pytest.importorskip("openenv.core.harness.capture.contract")
export: Any = pytest.importorskip("openenv.core.harness.capture.export")
validate: Any = pytest.importorskip("openenv.core.harness.capture.validate")
training: Any = pytest.importorskip("openenv.core.harness.training")

EPISODES = 1000
OF_A_STEP = 50
CALL = '<tool_call>\n{{"name": "lookup", "arguments": {{"word": "{}"}}}}\n</tool_call>'
BROKEN = '<tool_call>\n{{"name": "lookup", "arguments": {{"word": "{}\n</tool_call>'
FATAL = re.compile(r"\[FATAL\] (\w+):")

Turn = dict[str, Any]
Trace = dict[str, Any]


class TalkingEngine(RecordingEngine):
    """Says words and calls tools, at times in other tokens than the tokenizer makes of the same text."""

    splits = True

    def __init__(self, rng: random.Random, opened: Opened) -> None:
        super().__init__(rng)
        self._opened = opened

    def answer(self) -> list[int]:
        """See RecordingEngine."""
        text = "\n".join(self._part() for _ in range(self.rng.randrange(1, 4)))
        cut = self.rng.randrange(len(text)) if self.splits else 0
        end = self._opened.chat.stop_token_ids[-1]
        return [*self._opened.encode(text[:cut]), *self._opened.encode(text[cut:]), end]

    def _part(self) -> str:
        word = "".join(self.rng.choice("abcde é") for _ in range(self.rng.randrange(1, 9)))
        return self.rng.choice([word, CALL.format(word), CALL.format(word), BROKEN.format(word)])


class ToolAgent(WanderingAgent):
    """Has a tool. At times it asks for nothing but a title."""

    tools = (LOOKUP,)

    async def play(self) -> None:
        """See WanderingAgent."""
        if self._rng.random() < 0.03:
            await self._ask([{"role": "user", "content": "a title"}], role="auxiliary")
        else:
            await super().play()


class ProperEngine(TalkingEngine):
    """Writes as the chat template does, in the tokenizer's own tokens."""

    splits = False

    def _part(self) -> str:
        return CALL.format("".join(self.rng.choice("abcde") for _ in range(4)))


class PatientAgent(ToolAgent):
    """Cuts no answer."""

    async def _ask(self, messages: list[dict[str, Any]], **asked: Any) -> ChatAnswer | None:
        return await super()._ask(messages, **asked | {"cap": None})


class Episode(NamedTuple):
    """An exported episode, and what its agent asked and got."""

    trace: Trace
    asked: dict[str, ChatCall]
    seen: dict[str, ChatAnswer]
    """The answers to be trained, by their ids."""


class Exported(NamedTuple):
    """Many episodes."""

    episodes: list[Episode]
    untrained: int
    """Further ones, of which nothing may be trained."""
    counts: Counter[str]
    opened: Opened


async def make(
    opened: Opened, count: int, engine: type[TalkingEngine], agent: type[WanderingAgent], *room: int
) -> tuple[list[Trajectory], list[WanderingAgent], Counter[str]]:
    """Play episodes; return those of which something may be trained, with their agents."""
    trajectories, agents, counts = list[Trajectory](), list[WanderingAgent](), Counter[str]()
    for seed in range(count):
        made = engine(random.Random(seed), opened)
        attempt, _, played_by = await played(seed, made, agent, room=room, chat_format=opened.chat)
        counts += attempt.session.counts
        if attempt.recorder.newest_main() is not None:
            whole = attempt.recorder.to_trajectory(LEASE, {}, 1.0, "w")
            trajectories.append(replace(whole, tid=TrajectoryId(PROMPT.group, 0, len(trajectories))))
            agents.append(played_by)
        else:
            assert not trained(played_by), "what the agent saw is lost"
            with pytest.raises(AssertionError):
                attempt.recorder.to_trajectory(LEASE, {}, 1.0, "w")
    return trajectories, agents, counts


def trained(agent: WanderingAgent) -> dict[str, ChatAnswer]:
    return {answer.id: answer for role, answer in agent.seen if role == "main" and answer.token_ids}


def exported(
    directory: Path, count: int, engine: type[TalkingEngine], agent: type[WanderingAgent], *room: int
) -> Exported:
    """Play episodes, log them as a learner does, and export them by the command."""
    (directory / "experience").mkdir()
    (directory / "config.yaml").touch()
    opened = opened_in(directory / "model", "hermes")
    trajectories, agents, counts = asyncio.run(make(opened, count, engine, agent, *room))
    log = ExperienceLog(directory / "experience", 1 << 30)
    for step, first in enumerate(range(0, len(trajectories), OF_A_STEP)):
        taken = tuple(trajectories[first : first + OF_A_STEP])
        log.record(step, [Group(prompt=PROMPT, round=0, trajectories=taken)])
    out = directory / "traces.jsonl"
    answer = CliRunner().invoke(cli, ["trajectories", str(directory), "--as", "openenv", "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    traces = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(answer.stdout)["traces"] == len(traces) == len(trajectories)
    episodes = [Episode(trace, one.asked, trained(one)) for trace, one in zip(traces, agents, strict=True)]
    return Exported(episodes, count - len(traces), counts, opened)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory.mktemp("mixed"), EPISODES, TalkingEngine, ToolAgent, 700, 4000, 4000)


def node_of(turn: Turn, call: ChatCall | None = None, answer: ChatAnswer | None = None) -> Any:
    """Return a turn as OpenEnv's proxy would have captured it, of a client that sends no content as "": the template
    takes no null."""
    messages = [message | {"content": message["content"] or ""} for message in call.messages] if call else []
    return capture.TurnNode(
        node_id=turn["node_id"],
        prompt_ids=turn["prompt_token_ids"],
        sampled_ids=turn["completion_token_ids"],
        sampled_logprobs=turn["per_token_logps"],
        finish_reason=turn["metadata"]["finish_reason"],
        n_tools=len(call.tools) if call else 0,
        request_messages=messages,
        request_tools=call.tools if call else None,
        response_message=answer.message if answer else {},
    )


def graph_of(episode: Episode) -> Any:
    graph = capture.RolloutGraph()
    for turn in episode.trace["turns"]:
        name = turn["node_id"]
        graph.add_turn(node_of(turn, episode.asked[name], episode.seen[name]))
    return graph


def document_of(graph: Any) -> dict[str, Any]:
    """Return OpenEnv's own export of a graph, of the calls that it would take for the agent's."""
    session = SimpleNamespace(graph=graph, session_id="s", metadata={}, findings=[])
    document: dict[str, Any] = export.export_session(session, include_discarded=True, include_messages=True)
    return document


def reports_of(turn: Turn) -> Iterator[str]:
    """Yield what OpenEnv says of one turn, which is a sequence, too."""
    read, sampled, logprobs = turn["prompt_token_ids"], turn["completion_token_ids"], turn["per_token_logps"]
    yield validate.check_turn(read, sampled, logprobs).text()
    try:
        validate.validate_training_turn(read, sampled, logprobs, turn["loss_mask"])
    except ValueError as error:
        yield str(error)
    if logprobs is not None:
        ids, scored = [*read, *sampled], [0.0] * len(read) + logprobs
        sequence = SimpleNamespace(input_ids=ids, loss_mask=turn["loss_mask"], logprobs=scored, prompt_len=len(read))
        yield validate.check_sequence(sequence).text()


def fatal_codes(trace: Trace) -> Counter[str]:
    """Return what OpenEnv finds fatal in the turns of a trace, in the paths of its graph, and in the whole."""
    graph = capture.RolloutGraph()
    for turn in trace["turns"]:
        graph.add_turn(node_of(turn))
    reports = [report for turn in trace["turns"] for report in reports_of(turn)]
    reports.append(validate.check_rollout(graph).text())
    reports += [validate.check_sequence(sequence).text() for sequence in graph.sequences()]
    return Counter(code for report in reports for code in FATAL.findall(report))


def test_nothing_is_fatal_in_a_thousand_episodes(mixed: Exported) -> None:
    assert len(mixed.episodes) + mixed.untrained == EPISODES
    assert len(mixed.episodes) > EPISODES * 0.9
    codes = Counter[str]()
    for episode in mixed.episodes:
        codes += fatal_codes(episode.trace)
    assert codes == {}


def test_the_episodes_are_of_all_kinds(mixed: Exported) -> None:
    kinds = {"forks", "auxiliary_turns", "over_budget", "resumed", "repeated", "unseen_turns", "turn_timeouts"}
    assert kinds <= {kind for kind, count in mixed.counts.items() if count >= 20}
    found = [turn["metadata"] for episode in mixed.episodes for turn in episode.trace["turns"]]
    assert sum(one["tool_calls"] > 1 for one in found) > 100
    assert sum(one["finish_reason"] == "length" for one in found) > 100
    assert mixed.untrained > 5


def test_openenv_reads_each_line_as_a_trace_of_what_the_agent_saw(mixed: Exported) -> None:
    for episode in mixed.episodes:
        trace = training.TrainingTrace.model_validate_json(json.dumps(episode.trace))
        assert trace.schema_version == 1
        assert {turn.node_id for turn in trace.turns} == set(episode.seen)
        for turn in trace.turns:
            answer = episode.seen[turn.node_id]
            assert turn.prompt_token_ids == answer.prompt_token_ids
            assert turn.completion_token_ids == answer.token_ids
            assert turn.per_token_logps == pytest.approx(answer.logprobs, abs=1e-6)
            assert turn.loss_mask == [0] * len(answer.prompt_token_ids) + [1] * len(answer.token_ids)


def test_openenv_links_the_turns_as_the_recorder_did(mixed: Exported) -> None:
    """Where turns have the same tokens either may be the parent, and a longer beginning than the recorder's may be
    found by chance."""
    linked, chance = 0, 0
    for episode in mixed.episodes:
        graph = graph_of(episode)
        for turn in episode.trace["turns"]:
            after = turn["metadata"]["after"]
            node = graph.get(turn["node_id"])
            if after not in episode.seen:
                continue
            before = graph.get(after).end_ids
            if node.prompt_ids[: len(before)] == before:
                parent = graph.get(node.parent_id).end_ids
                linked, chance = linked + (parent == before), chance + (parent != before)
    assert linked > EPISODES
    assert chance < linked / 100


def test_openenvs_own_export_makes_the_same_traces(mixed: Exported) -> None:
    """It leaves out conversations without tools, and those that led nowhere."""
    turns = 0
    for episode in mixed.episodes:
        graph = graph_of(episode)
        document = document_of(graph)
        assert [finding for finding in document["validation"] if "FATAL" in finding] == []
        ours = {turn["node_id"]: turn for turn in episode.trace["turns"]}
        for theirs in contract.to_training_trace(graph, document).turns:
            turns += 1
            mine = ours[theirs.node_id]
            assert theirs.model_dump(include=set(mine) - {"metadata"}) == {
                name: value for name, value in mine.items() if name != "metadata"
            }
    assert turns > EPISODES


def skew_of(made: Exported) -> tuple[int, int, int]:
    """Return the turns whose conversations OpenEnv tokenizes anew, those that then have other tokens, and those that
    the template refuses."""
    turns = other = refused = 0
    for episode in made.episodes:
        graph = graph_of(episode)
        document = document_of(graph)
        found = contract.measure_retokenization_skew(graph, document, made.opened.tokenizer)
        turns += found["n_turns"]
        refused += found["n_errors"]
        other += sum(not one.get("exact", True) for one in found["turns"])
    return turns, other, refused


def test_tokenizing_anew_would_train_on_other_tokens(mixed: Exported) -> None:
    turns, other, refused = skew_of(mixed)
    print(f"{other + refused} of {turns} turns have other tokens if their conversations are tokenized anew")
    assert turns > EPISODES
    assert other > turns / 10


def test_what_a_model_writes_as_its_template_does_has_the_same_tokens(tmp_path: Path) -> None:
    made = exported(tmp_path, 40, ProperEngine, PatientAgent, 20_000)
    turns, other, refused = skew_of(made)
    assert turns > 100
    assert (other, refused) == (0, 0)


def _set(name: str, place: int, value: Any) -> Callable[[Turn], None]:
    def change(turn: Turn) -> None:
        turn[name][place] = value

    return change


def _put(name: str, make_value: Callable[[Turn], Any]) -> Callable[[Turn], None]:
    def change(turn: Turn) -> None:
        turn[name] = make_value(turn)

    return change


def _silence(turn: Turn) -> None:
    turn["completion_token_ids"], turn["per_token_logps"] = [], []
    turn["loss_mask"] = [0] * len(turn["prompt_token_ids"])


def _untrain(turn: Turn) -> None:
    turn["loss_mask"] = [0] * len(turn["loss_mask"])
    turn["per_token_logps"] = [0.0] * len(turn["per_token_logps"])


MUTATIONS: dict[str, Callable[[Turn], None]] = {
    "invalid_token_id": _set("completion_token_ids", 0, -1),
    "no_logprobs": _put("per_token_logps", lambda turn: None),
    "invalid_logprob": _set("per_token_logps", 0, float("nan")),
    "logprob_misalign": _put("per_token_logps", lambda turn: turn["per_token_logps"][:-1]),
    "length_mismatch": _put("loss_mask", lambda turn: turn["loss_mask"][:-1]),
    "invalid_loss_mask": _set("loss_mask", -1, 2),
    "trainable_prompt": _set("loss_mask", 0, 1),
    "nothing_trainable": _untrain,
    "masked_has_logprob": _set("loss_mask", -1, 0),
    "positive_logprob": _set("per_token_logps", 0, 0.5),
    "empty_response": _silence,
    "no_prompt_ids": _put("prompt_token_ids", lambda turn: []),
}


@pytest.mark.parametrize("code", MUTATIONS)
def test_a_turn_that_is_changed_is_found(mixed: Exported, code: str) -> None:
    trace = copy.deepcopy(mixed.episodes[0].trace)
    turn = next(turn for turn in trace["turns"] if len(turn["completion_token_ids"]) > 1)
    assert fatal_codes(trace) == {}
    MUTATIONS[code](turn)
    assert fatal_codes(trace)[code]


def test_a_trace_without_turns_is_found() -> None:
    assert fatal_codes({"turns": []}) == {"no_turns": 1}

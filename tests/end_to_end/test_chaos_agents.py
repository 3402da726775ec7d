"""The chaos benchmark with agents: the product passes a short trial, and the audit of turns finds every fault."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.chaos import protections
from benchmarks.chaos.agent import Agent, Answered, Effect, Journal
from benchmarks.chaos.audit import MUST_BE_ZERO, Trained
from benchmarks.chaos.episodes import NONCE, Answer, EpisodeTurn, trained_turns, turn_of, what_is_wrong_in
from benchmarks.chaos.journal import MUST_BE_ZERO as TURNS_MUST_BE_ZERO
from benchmarks.chaos.journal import audit_turns, read_journal
from benchmarks.chaos.tasks import logprobs_of
from benchmarks.chaos.user_code import text_of
from headway.broker.schema import AgentCall, Lease, Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.learner.data.prompts.cursor import group_at
from headway.rollout_workers.agents.tree import EpisodeRecorder
from headway.rollout_workers.engines.base import Chunk
from headway.rollout_workers.samples.recorder import Recorder

TID = TrajectoryId(group_at((0, 7)), 0, 1)
VERSION = WeightVersion(1, 2)
RECEIPT = "000042"
CLEAN = dict.fromkeys(TURNS_MUST_BE_ZERO, 0)
EVENTFUL = 39
"""A seed of trials in which a worker, agents or their process, the server and the learner are killed within seconds,
and the server loses power."""


PATIENCE = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Minutes of the trials, of which the next one follows where a busy machine has not shown everything yet."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("agents", ["hosted", "outside"])
def test_short_trials_lose_no_turn(agents: str) -> None:
    """They end once everything has happened that is to cost nothing."""
    wanted = {"kill learner", "kill server", "kill worker", {"hosted": "kill host", "outside": "kill agents"}[agents]}
    wanted |= {"power_losses", "several turns", "episodes_resumed", "tokens_saved", "tool_calls", "several attempts"}
    seen, left = set[str](), list(PATIENCE)
    while not seen >= wanted and left:
        seen |= seen_in_a_trial(agents, left.pop(0))
    assert seen >= wanted


def seen_in_a_trial(agents: str, minutes: float) -> set[str]:
    """Return what has happened in a trial that loses nothing."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--agents", agents, "--seed", str(EVENTFUL)]
    command += ["--minutes", str(minutes)]
    trial = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    outcome = json.loads(trial.stdout.splitlines()[-1])
    episodes = outcome["episodes"]
    assert outcome.items() >= dict.fromkeys(MUST_BE_ZERO, 0).items()
    assert episodes.items() >= CLEAN.items()
    happened = {f"kill {role}": times for role, times in outcome["kills"].items()}
    happened |= {name: episodes[name] for name in ("episodes_resumed", "tokens_saved", "tool_calls")}
    happened |= {
        "power_losses": outcome["power_losses"],
        "several turns": episodes["turns"] > outcome["tasks"],
        "several attempts": episodes["attempts_per_episode"] > 1,
    }
    return {name for name, times in happened.items() if times}


def test_what_one_attempt_was_answered_is_what_is_trained(tmp_path: Path) -> None:
    assert found(tmp_path, *played("first")[:3], *played("second")) == CLEAN


def test_a_turn_that_no_agent_was_answered(tmp_path: Path) -> None:
    answered, effect, _ = played("first")
    assert found(tmp_path, answered, effect) == {**CLEAN, "unanswered": 1}


def test_an_answer_that_is_not_trained(tmp_path: Path) -> None:
    assert found(tmp_path, *played("first"), trained=turns()[:1]) == {**CLEAN, "unrecorded": 1}


def test_turns_of_two_attempts(tmp_path: Path) -> None:
    answered, _, last = played("first")
    other = msgspec.structs.replace(last, attempt="second", said=[3, *last.said[1:]])
    both = (*turns(), turn_of(last.read, other.said))
    entries: list[Any] = [*played("first"), msgspec.structs.replace(answered, attempt="second"), other]
    assert found(tmp_path, *entries, trained=both) == {**CLEAN, "unanswered": 1}


def test_a_call_that_was_made_twice_in_one_attempt(tmp_path: Path) -> None:
    answered, effect, last = played("first")
    assert found(tmp_path, answered, effect, effect, last) == {**CLEAN, "effects_twice": 1}


def test_a_call_that_is_trained_in_two_samples(tmp_path: Path) -> None:
    others: list[Any] = [msgspec.structs.replace(one, sample=2) for one in played("first")]
    again = Trained(f"{TID.group}:0:2", (), 0, "", turns=turns())
    calls = sum(bool(one.argument) for one in turns())
    assert found(tmp_path, *played("first"), *others, more=(again,)) == {**CLEAN, "effects_twice": calls}


@pytest.mark.parametrize("receipt", ["000043", None])
def test_an_answer_that_the_tool_did_not_give(receipt: str | None, tmp_path: Path) -> None:
    answered, effect, last = played("first")
    other = [] if receipt is None else [msgspec.structs.replace(effect, receipt=receipt)]
    assert found(tmp_path, answered, *other, last) == {**CLEAN, "effects_unlike": 1}


def test_an_agent_notes_its_answers_and_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.chaos.agent.RAISES", 0.0)
    monkeypatch.setattr("benchmarks.chaos.agent.HANGS", 0.0)
    monkeypatch.setattr("benchmarks.chaos.agent.EXITS", 0.0)
    from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask

    said = [("[12345678]", [{"id": "call_0_0", "name": "book", "arguments": '{"number": "12345678"}'}]), ("87", [])]

    async def call(path: str, body: dict[str, Any]) -> Any:
        text, calls = said.pop(0)
        message = {"role": "assistant", "content": text}
        tokens = [1] * len(text)
        reason = "tool_calls" if calls else "stop"
        return {"content": text, "tool_calls": calls, "message": message, "finish_reason": reason,
                "prompt_token_ids": [2], "token_ids": tokens}  # fmt: skip

    task = AgentTask(id="0000-00000002", text="00000002", messages=[{"role": "user", "content": "00000002"}])
    outcome = asyncio.run(Agent(str(tmp_path / "journal")).rollout(AgentEpisode("", "", call), task))
    (attempt,) = read_journal(tmp_path / "journal")["0000-00000002", 0].values()
    assert attempt.turns.total() == 2
    assert [len(one) for one in attempt.receipts["12345678"]] == [6]
    assert 0 <= outcome["reward"] <= 1


@pytest.mark.parametrize("damage", ["none", "token", "logprob", "version", "mask", "read", "group"])
def test_what_the_engine_did_not_sample_is_noticed(damage: str) -> None:
    prompt, trajectory = sampled()
    first, last = trajectory.turns
    match damage:
        case "token":
            trajectory.response_tokens[last.start + NONCE] = (trajectory.response_tokens[last.start + NONCE] + 1) % 10
        case "logprob":
            trajectory.behavior_logprobs[first.start + 1] -= 0.01
        case "version":
            spans = (VersionSpan(0, len(trajectory.response_tokens), WeightVersion(1, 3)),)
            trajectory = msgspec.structs.replace(trajectory, spans=spans)
        case "mask":
            trajectory.loss_mask[first.end] = 1
        case "read":
            trajectory.response_tokens[first.end] += 1
        case "group":
            prompt = msgspec.structs.replace(prompt, group=group_at((0, 8)))
    assert bool(what_is_wrong_in(prompt, trajectory)) == (damage != "none")


def test_only_turns_in_the_loss_are_trained() -> None:
    _, trajectory = sampled()
    assert trained_turns(trajectory) == turns()
    trajectory.loss_mask[trajectory.turns[0].start : trajectory.turns[0].end] = 0
    assert trained_turns(trajectory) == turns()[1:]


@pytest.mark.parametrize("name", ["durable_answer", "recorded_answers", "unseen_turns"])
def test_an_agents_protection_names_who_plays(name: str) -> None:
    assert protections.PROTECTIONS[name].agents


def sampled() -> tuple[Prompt, Trajectory]:
    """Return a prompt, and an episode of two turns as the engine's double samples it."""
    text = text_of(7)
    prompt = Prompt(
        group=TID.group,
        token_ids=[int(digit) for digit in text],
        text=text,
        ground_truth="",
        data_source="chaos",
        num_samples=4,
    )
    recorder = EpisodeRecorder(prompt=prompt.token_ids)
    for number in range(2):
        after = number - 1
        read = [int(digit) for digit in RECEIPT] if number else []
        whole = [*recorder.row(after), *read]
        answer = Answer(TID, whole, [number] * NONCE)
        tokens, turn = answer.tokens(0, answer.length, VERSION), Recorder()
        logprobs = logprobs_of(np.array(tokens, np.int32)).tolist()
        turn.add(Chunk(token_ids=tokens, logprobs=logprobs, version=VERSION, finish_reason="stop"))
        recorder.add_turn(read, turn, AgentCall(after=after, keeps=len(recorder.row(after))))
    lease = Lease(tid=TID, token="token", ttl_s=10.0, prompt=prompt)
    return prompt, recorder.to_trajectory(lease, {}, 1.0, "w")


def turns() -> tuple[EpisodeTurn, ...]:
    return trained_turns(sampled()[1])


def played(attempt: str) -> tuple[Answered, Effect, Answered]:
    """Return what an attempt at the episode notes."""
    _, trajectory = sampled()
    tokens = [*trajectory.prompt_tokens.tolist(), *trajectory.response_tokens.tolist()]
    of_sample = TID.group, TID.sample, attempt
    first, last = ((8 + turn.start, 8 + turn.end) for turn in trajectory.turns)
    answered = [Answered(*of_sample, read=tokens[:start], said=tokens[start:end]) for start, end in (first, last)]
    return answered[0], Effect(*of_sample, argument=turns()[0].argument, receipt=RECEIPT), answered[1]


def found(
    directory: Path,
    *entries: Answered | Effect,
    trained: tuple[EpisodeTurn, ...] | None = None,
    more: tuple[Trained, ...] = (),
) -> dict[str, int]:
    """Return the audit of the episode, or of these turns of it, beside a journal."""
    journal = Journal(directory / "journal")
    for entry in entries:
        journal.note(entry)
    one = Trained(str(TID), (), 0, "", turns=turns() if trained is None else trained)
    audit = audit_turns((one, *more), read_journal(directory / "journal"))
    return {name: getattr(audit, name) for name in CLEAN}

"""`headway trajectories` writes the episodes that a learner took, turn by turn, or says why it cannot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headway.broker.errors import HeadwayError
from headway.broker.schema import AgentCall, Group, Trajectory, Turn, VersionSpan, WeightVersion
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.run.openenv_traces import NoAgentError, logged_traces, trace_of, write_traces
from headway.learner.experience.log import ExperienceLog
from headway.learner.experience.log_files import LoggedBatchError
from tests.learner.batches import damage, group

from .test_cli import headway

KEPT = 1 << 20


def episode(trajectory: Trajectory) -> Trajectory:
    """Return it as an agent's: an answer of two versions, one that goes on, a title, and a branch."""
    prompt = len(trajectory.prompt_tokens)
    mask = np.array([1, 1, 0, 1, 0, 0, 0, 1], np.uint8)
    calls = [
        (0, 2, AgentCall(-1, prompt, tool_calls=1)),
        (3, 4, AgentCall(0, prompt + 2)),
        (5, 6, AgentCall(-1, 0, role="auxiliary")),
        (7, 8, AgentCall(0, prompt + 1, finish_reason="length")),
    ]
    return replace(
        trajectory,
        response_tokens=np.arange(10, 18, dtype=np.int32),
        behavior_logprobs=np.array([-0.5, 5e-4, 0, -0.25, 0, 0, 0, -1], np.float32),
        loss_mask=mask,
        spans=(VersionSpan(0, 1, WeightVersion(1, 3)), VersionSpan(1, 8, WeightVersion(1, 4))),
        turns=tuple(Turn(start, end, 0.25, call) for start, end, call in calls),
        reward=1.0,
    )


def episodes(number: int) -> Group:
    made = group(number, (0, 1))
    return replace(made, trajectories=tuple(map(episode, made.trajectories)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run of three steps."""
    directory = tmp_path / "made"
    (directory / "experience").mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_recipe(load_recipe("arithmetic.yaml")))
    log = ExperienceLog(directory / "experience", KEPT)
    for step in range(3):
        log.record(step, [episodes(2 * step), episodes(2 * step + 1)])
    return directory


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_turn_has_what_was_read_and_what_was_sampled() -> None:
    (trajectory, _) = episodes(1).trajectories
    first, second, branch = trace_of(trajectory, 4).turns
    prompt = trajectory.prompt_tokens.tolist()
    assert (first.node_id, second.node_id, branch.node_id) == ("turn-0", "turn-1", "turn-3")
    assert (first.prompt_token_ids, first.completion_token_ids) == (prompt, [10, 11])
    assert (second.prompt_token_ids, second.completion_token_ids) == ([*prompt, 10, 11, 12], [13])
    assert (branch.prompt_token_ids, branch.completion_token_ids) == ([*prompt, 10, 16], [17])
    assert second.loss_mask == [0] * (len(prompt) + 3) + [1]
    assert (first.per_token_logps, branch.per_token_logps) == ([-0.5, 0.0], [-1.0])


def test_metadata_says_what_openenv_has_no_field_for() -> None:
    (trajectory, _) = episodes(1).trajectories
    first, second, branch = (turn.metadata for turn in trace_of(trajectory, 4).turns)
    assert first.versions == [(0, 1, "1.3"), (1, 2, "1.4")]
    assert second.versions == [(0, 1, "1.4")]
    assert (first.after, second.after, branch.after) == ("", "turn-0", "turn-0")
    assert (first.tool_calls, branch.finish_reason, branch.index) == (1, "length", 3)
    assert (first.trajectory, first.step, first.reward, first.episode_reward) == (str(trajectory.tid), 4, 0.25, 1.0)


def test_the_command_writes_a_line_for_each_episode(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces.jsonl"
    answer = headway("trajectories", "made", "--as", "openenv", "--out", str(out), "--json", cwd=_named(run))
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == {
        "out": str(out),
        "steps": 3,
        "traces": 12,
        "turns": 36,
        "trained_tokens": 48,
    }
    written = lines(out.read_text())
    assert [trace["schema_version"] for trace in written] == [1] * 12
    assert len({trace["turns"][0]["metadata"]["trajectory"] for trace in written}) == 12
    assert list(tmp_path.glob(".*")) == []
    printed = headway("trajectories", str(run), "--from", "1", "--steps", "1", cwd=tmp_path)
    assert lines(printed.stdout) == written[4:8]


def _named(run: Path) -> Path:
    """Return a directory whose ./runs has the run."""
    (run.parent / "runs").mkdir()
    (run.parent / "runs" / run.name).symlink_to(run)
    return run.parent


def test_a_trajectory_of_no_agent_is_refused_and_nothing_written(run: Path, tmp_path: Path) -> None:
    ExperienceLog(run / "experience", KEPT).record(3, [episodes(8), group(9)])
    out = tmp_path / "traces.jsonl"
    out.write_text("before")
    answer = headway("trajectories", str(run), "--out", str(out), cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: Trajectory 0000-00000009:0:0 of step 3 was not played by an agent")
    assert len(answer.stderr.splitlines()) == 1
    assert (out.read_text(), list(tmp_path.glob(".*"))) == ("before", [])
    with pytest.raises(NoAgentError, match="Only runs whose recipe has `agent:`"):
        trace_of(group(1).trajectories[0], 0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--out", "nowhere/traces.jsonl"], "There is no directory nowhere for traces.jsonl"),
        (["--from", "3"], "it has steps 0 to 2."),
    ],
)
def test_what_cannot_be_written_is_one_paragraph(run: Path, tmp_path: Path, asked: list[str], message: str) -> None:
    answer = headway("trajectories", str(run), *asked, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert message in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_json_says_what_was_written_into_a_file(run: Path, tmp_path: Path) -> None:
    answer = headway("trajectories", str(run), "--json", cwd=tmp_path)
    assert answer.returncode == 2
    assert "--json needs --out" in answer.stderr


def test_batches_are_read_one_at_a_time(run: Path) -> None:
    damage(run / "experience", 1)
    traces = logged_traces(run / "experience")
    assert [next(traces).turns[0].metadata.step for _ in range(4)] == [0] * 4
    with pytest.raises(LoggedBatchError):
        next(traces)


def test_a_damaged_batch_is_named(run: Path, tmp_path: Path) -> None:
    damage(run / "experience", 1)
    with pytest.raises(LoggedBatchError, match="the batch of step 1 is damaged"):
        write_traces(run / "experience", tmp_path / "traces.jsonl")
    with pytest.raises(HeadwayError, match="has no batch of the steps that are asked for: it has none"):
        write_traces(run / "nothing", tmp_path / "traces.jsonl")

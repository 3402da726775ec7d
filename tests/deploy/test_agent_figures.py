"""The figures of agents' episodes: sums over workers, tables, curves, and nothing in a run without an agent."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import AgentInfo, RunStatus
from headway.deploy.observe.page.content import run_figures
from headway.deploy.observe.sinks.trackers import points
from headway.deploy.observe.status_tables import status_json, status_tables
from headway.deploy.run.agent_figures import agents_together
from headway.deploy.run.record import read_record

from .runs import AGENT, AGENT_FIGURES, open_record, run_status, step_event, worker
from .test_tables import assert_whole, text_of


def status() -> RunStatus:
    workers = tuple(replace(worker(name, WeightVersion(1, 37)), agent=AGENT) for name in ("a", "b"))
    return replace(run_status(), workers=workers)


def test_the_reports_of_workers_are_summed_up_with_their_shares() -> None:
    found = agents_together(status().workers)
    assert found is not None
    assert (found.episodes, found.finished, found.tool_s, found.turns) == (240, 2000, 2000.0, 8000)
    assert (found.failures, found.refused_calls) == ({"raised": 14, "timeout": 4}, {"temperature": 8, "busy": 2})
    assert (found.turns_per_episode, found.tool_s_per_turn) == (3.5, 0.25)
    assert (found.fork_fraction, found.reread_fraction) == (0.01, 0.005)
    idle = agents_together([replace(worker("a", None), agent=AgentInfo())])
    assert idle is not None
    assert (idle.turns_per_episode, idle.fork_fraction, idle.failures) == (None, None, {})


def test_the_status_shows_agents_in_words_that_stay_whole() -> None:
    with_agents = status_tables(status())
    assert_whole(with_agents, 80, only_wide=("host", "pid", "node", "4711"))
    shown = " ".join(text_of(with_agents, 120).split())
    assert "24 turns unseen, 6 calls resumed" in shown
    assert "failed: 14 raised, 4 timeout; calls refused: 8 temperature, 2 busy" in shown
    assert "240 32 192 2,000 3.50 0.25 1.0% 0.5%" in shown
    assert "Agents' episodes" not in text_of(status_tables(run_status()), 120)


def test_curves_of_agents_are_there_in_runs_with_agents(tmp_path: Path) -> None:
    plain = step_event(0)
    event = replace(plain, metrics=replace(plain.metrics, agent=AGENT_FIGURES))
    tags = dict(points(event))
    assert (tags["agent/turns_mean"], tags["agent/failures/raised"]) == (3.5, 2)
    assert not [tag for tag, _ in points(plain) if tag.startswith("agent")]
    assert msgspec.json.decode(msgspec.json.encode(event), type=type(event)) == event
    assert b"agent" not in msgspec.json.encode(plain)
    for name, written in (("plain", plain), ("agents", event)):
        open_record(tmp_path / name).write(written)
    drawn = {name: run_figures(read_record(str(tmp_path / name))).curves for name in ("plain", "agents")}
    assert drawn["agents"]["agent/turns_mean"].mean == [3.5]
    assert not [name for name in drawn["plain"] if name.startswith("agent")]


def test_the_json_of_a_run_without_agents_has_no_word_of_them() -> None:
    assert b"agent" not in msgspec.json.encode(status_json(run_status()))
    assert status_json(status())["agents"]["waiting_for_tools"] == 192

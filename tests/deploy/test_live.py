"""The live lines of a run, on a terminal and in a pipe, and `headway status`."""

import io
import re
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import RenderableType

from headway.broker.errors import BrokerUnavailableError, RunNotFoundError
from headway.broker.schema.status import DeadLetter, Fault, RunStatus
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.live import NO_LEARNER, NOTHING_TRAINED, Monitor, changes, panel
from headway.deploy.observe.run_warnings import FaultReporter, FlatRewardReporter, flat_reward_text
from headway.deploy.observe.status_tables import status_json, status_tables
from headway.deploy.terminal import Terminal

from .runs import run_status, step_metrics


def text_of(content: RenderableType) -> str:
    console = Terminal(width=120, record=True, file=io.StringIO())
    console.print(content)
    return console.export_text()


def test_the_panel_shows_progress_reward_lag_speed_queue_and_workers() -> None:
    text = text_of(panel(run_status(), max_lag=2, elapsed_s=75.0))
    for part in (
        "arithmetic training",
        "step 37/60",
        "1:15, about 0:46 left",
        "mean of 5: 0.817",
        "mean 1.25, max 2, 2 allowed",
        "5,000 generated, 2,000 trained",
        "12 groups ready, 40 open, 64 waiting; 120 samples leased, 1 over the bound",
        "node-worker-0-ab12  version 1.37  generating  60/64 leases",
        "node-worker-1-cd34  version -",
        "[x]",
    ):
        assert part in " ".join(text.split(" ")), part


def test_the_panel_before_the_first_step() -> None:
    text = text_of(panel(run_status(steps=0), max_lag=None, elapsed_s=1.0))
    assert "arithmetic training" in text
    assert "reward" not in text


def test_a_worker_that_was_set_aside_is_told_once() -> None:
    fault = Fault(worker="w9", host="far", rule="version", reason="protocol 1, not 2.", at=0.0)
    text = "Worker w9 on host far is of another version of Headway: protocol 1, not 2."
    status = replace(run_status(), faults=(fault,))
    assert [line for line in changes(run_status(), status) if "w9" in line] == [text]
    assert list(changes(status, status)) == []
    told = FaultReporter()
    assert (list(told.news(status)), list(told.news(status))) == ([text], [])
    shown = " ".join(text_of(status_tables(status)).split())
    assert "Workers that were set aside in the last hour" in shown
    assert "protocol 1, not 2." in shown
    assert status_json(status)["faults"][0]["worker"] == "w9"


def steps_of(flat: str) -> tuple[StepMetrics, ...]:
    """Return a step for each character: `=` for one whose groups are all flat, `+` for one that trained, and `c` for
    one that a critic trained on flat groups."""
    figures = {"=": (1.0, 0.0), "+": (0.5, 0.25), "c": (1.0, 0.25)}
    return tuple(
        replace(step_metrics(number), flat_groups=figures[kind][0], grad_norm=figures[kind][1])
        for number, kind in enumerate(flat)
    )


@pytest.mark.parametrize(
    ("flat", "told_at"),
    [("=====", [3]), ("==+==", []), ("===+====", [3, 7]), ("===c==", [3]), ("cccc", []), ("++++", [])],
)
def test_that_nothing_is_trained_is_told_once_and_again_after_a_step_that_trained(
    flat: str, told_at: list[int]
) -> None:
    output, news, before, found, changed = io.StringIO(), FlatRewardReporter(), run_status(0), [], []
    looks = [replace(before, recent_steps=steps_of(flat[: count + 1])) for count in range(len(flat))]
    monitor = Monitor(Script(before, *looks), Terminal(file=output, width=500))
    monitor._refresh()
    for count, now in enumerate(looks, start=1):
        monitor._refresh()
        if text := news.news(now.recent_steps):
            found.append((count, text))
        changed += [(count, line) for line in changes(before, now) if "nothing is trained" in line]
        before = now
    assert [count for count, _ in found] == told_at
    assert changed == found
    assert [line for line in output.getvalue().splitlines() if "nothing is trained" in line] == [t for _, t in found]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([0, 0, 0], []),
        ([1, 1, 1], [1]),
        ([3, 4, 5, 6, 11, 12], [3, 6, 12]),
        ([0, 0, 40, 41], [40]),
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_prompts_that_were_passed_over_are_told_at_the_terminal(
    counts: list[int], told: list[int], *, is_terminal: bool
) -> None:
    output = io.StringIO()
    steps = [replace(step_metrics(number), long_prompts=count) for number, count in enumerate(counts)]
    looks = [replace(run_status(0), recent_steps=(), last_step=None)]
    looks += [replace(run_status(0), recent_steps=(step,), last_step=step) for step in steps]
    monitor = Monitor(Script(*looks), Terminal(file=output, width=500, force_terminal=is_terminal))
    for _ in looks:
        monitor._refresh()
    lines = [line for line in output.getvalue().splitlines() if "passed over" in line]
    assert [int(line.split()[0]) for line in lines] == told
    assert all("engine.max_model_len" in line and "sampling.max_new_tokens" in line for line in lines)


def test_steps_that_a_monitor_finds_are_not_told_as_if_they_were_its_runs() -> None:
    old, new = steps_of("===="), tuple(replace(step, incarnation=2) for step in steps_of("==="))
    output = io.StringIO()
    looks = [replace(run_status(0), recent_steps=(*old, *new[:count])) for count in (0, 0, 1, 2, 3)]
    monitor = Monitor(Script(*looks), Terminal(file=output, width=500))
    told = []
    for _ in looks:
        monitor._refresh()
        told.append("nothing is trained" in output.getvalue())
    assert told == [False, False, False, False, True]


def test_steps_of_an_earlier_learner_do_not_count_as_steps_in_a_row() -> None:
    old, new = steps_of("==="), tuple(replace(step, incarnation=2) for step in steps_of("===="))
    assert "nothing is trained" in flat_reward_text(old)
    assert flat_reward_text([*old, *new[:2]]) == ""
    assert flat_reward_text([*old, *new[:3]])


class Script:
    """A sequence of looks at a run, in which no process waits; the last one repeats."""

    def __init__(self, *looks: RunStatus | Exception) -> None:
        self._looks: Iterator[RunStatus | Exception] = iter(looks)
        self._last = looks[-1]

    def __call__(self) -> tuple[RunStatus, None]:
        look = next(self._looks, self._last)
        if isinstance(look, Exception):
            raise look
        return look, None


@pytest.mark.parametrize(("others", "said"), [("none.", ""), ("first, second.", " Runs there: first, second.")])
def test_who_waits_for_a_run_sees_the_names_of_the_others(others: str, said: str) -> None:
    output = io.StringIO()
    script = Script(RunNotFoundError(f"No run frist at redis://x. Runs there: {others}"))
    Monitor(script, Terminal(file=output, width=200))._refresh()
    assert output.getvalue() == f"{NO_LEARNER}{said}\n"


def test_in_a_pipe_a_wait_for_a_learner_is_said_again_only_for_a_run_that_was_not_named() -> None:
    output = io.StringIO()
    lists = "none.", "none.", "first.", "first, second.", "second.", "first, second.", "none.", "second, third."
    script = Script(*(RunNotFoundError(f"No run frist at redis://x. Runs there: {others}") for others in lists))
    monitor = Monitor(script, Terminal(file=output, width=200))
    for _ in lists:
        monitor._refresh()
    named = ["", " Runs there: first.", " Runs there: first, second.", " Runs there: second, third."]
    assert output.getvalue().splitlines() == [f"{NO_LEARNER}{names}" for names in named]


def test_an_answer_that_does_not_come_once_the_monitor_is_over_is_not_told() -> None:
    output = io.StringIO()
    monitor = Monitor(Script(run_status(1), BrokerUnavailableError("away")), Terminal(file=output, width=200))
    monitor._over.set()
    with monitor:
        pass
    assert "away" not in output.getvalue()


def test_in_a_pipe_every_step_is_one_line_once() -> None:
    output = io.StringIO()
    console = Terminal(file=output, width=200)
    script = Script(RunNotFoundError("not yet"), BrokerUnavailableError("away"), run_status(1), run_status(3))
    monitor = Monitor(script, console)
    for _ in range(4):
        monitor._refresh()
    with monitor:
        pass
    lines = output.getvalue().splitlines()
    assert lines[:3] == [NO_LEARNER, "broker: away", "Training."]
    assert [line.partition("/")[0] for line in lines[3:]] == ["step    1", "step    2", "step    3"]
    assert lines[3].endswith("generated 5,000 tokens/s  12 ready  2 workers")


def test_who_joins_a_run_is_told_where_it_stands_and_what_follows() -> None:
    output = io.StringIO()
    monitor = Monitor(Script(run_status(3), run_status(5)), Terminal(file=output, width=200))
    for _ in range(2):
        monitor._refresh()
    lines = output.getvalue().splitlines()
    assert [line.partition("/")[0] for line in lines[1:]] == ["step    3", "step    4", "step    5"]


def test_how_a_run_had_ended_that_is_resumed_is_old_news() -> None:
    output = io.StringIO()
    states = ("stopped", "training", "stopped")
    statuses = [msgspec.structs.replace(run_status(), state=state) for state in states]
    monitor = Monitor(Script(*statuses), Terminal(file=output, width=200))
    for _ in states:
        monitor._refresh()
    lines = output.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("step")] == [
        "Training.",
        "Stopped; --resume goes on from the last checkpoint.",
    ]


def test_the_end_of_a_run_is_told_behind_its_last_step() -> None:
    output = io.StringIO()
    monitor = Monitor(Script(run_status(1), replace(run_status(2), state="finished")), Terminal(file=output, width=200))
    for _ in range(2):
        monitor._refresh()
    assert [line.partition("/")[0] for line in output.getvalue().splitlines()] == [
        "Training.",
        "step    1",
        "step    2",
        "Finished.",
    ]


@pytest.mark.parametrize(
    ("states", "last", "is_told"),
    [
        (("finished", "claimed", "finished", "finished"), 3, True),
        (("finished", "claimed", "finished"), 4, False),
        (("stopped", "claimed", "finished"), 3, False),
        (("training", "finished"), 3, False),
    ],
)
def test_that_a_finished_run_was_resumed_in_vain_is_told_once(
    states: tuple[str, ...], last: int, is_told: bool
) -> None:
    output = io.StringIO()
    looks = [replace(run_status(3), state=state) for state in states[:-1]]
    monitor = Monitor(Script(*looks, replace(run_status(last), state=states[-1])), Terminal(file=output, width=200))
    for _ in states:
        monitor._refresh()
    assert output.getvalue().count(NOTHING_TRAINED) == is_told


def test_a_line_above_the_panel_leaves_its_markup_alone() -> None:
    output = io.StringIO()
    monitor = Monitor(
        Script(run_status()), Terminal(file=output, width=200, force_terminal=True, force_interactive=True)
    )
    with monitor:
        monitor._refresh()
        assert monitor._live is not None
        monitor._live.refresh()
        monitor.say("worker-0 [exited]")
    assert "worker-0 [exited]" in output.getvalue()
    assert "[bold]" not in output.getvalue()


def test_status_tables_hold_versions_queues_workers_and_lags() -> None:
    text = text_of(status_tables(run_status()))
    for part in (
        "version 1.37 announced",
        "37 of 60",
        "5,000 generated, 2,000 trained",
        "node-worker-0-ab12",
        "60/64",
    ):
        assert part in text, part
    assert re.search(r"oldest +3\.0 s +7\.5 s", text)
    assert "1          4,000    0.692   0.900     0.250        -   ████████████████████" in text


def test_status_names_who_sent_what_cannot_be() -> None:
    letter = DeadLetter(tid="0000-00000007:0:3", worker="node-worker-1-cd34", reason="token id 999999\x1b[2J")
    status = replace(run_status(), dead_letters=(letter,), quarantined=("node-worker-1-cd34",))
    text = text_of(status_tables(status))
    for part in ("0000-00000007:0:3", "token id 999999", "No more leases for node-worker-1-cd34"):
        assert part in text, part
    assert "\x1b" not in text
    assert list(status_json(status)["quarantined"]) == ["node-worker-1-cd34"]
    assert "Refused" not in text_of(status_tables(run_status()))


def test_status_says_when_many_workers_send_what_cannot_be() -> None:
    letter = DeadLetter(tid="0000-00000007:0:3", worker="w", reason="token id 999999")
    status = replace(run_status(), dead_letters=(letter,), refused_lately=12, refused_workers=4)
    text = " ".join(text_of(status_tables(status)).split())
    assert "12 samples from 4 workers were refused within a minute" in text
    assert "delete passwords/worker" in text
    assert "refused within" not in text_of(status_tables(replace(status, refused_workers=2)))


def test_status_counts_evaluations_without_a_result() -> None:
    status = run_status()
    skipped = replace(status, queues=replace(status.queues, skipped_evaluations=2))
    assert "evaluations  2 skipped: " in text_of(status_tables(skipped))
    assert "evaluations" not in text_of(status_tables(status))
    assert status_json(skipped)["queues"]["skipped_evaluations"] == 2


def test_status_as_json() -> None:
    status = status_json(run_status())
    assert status["announced"] == "1.37"
    assert [worker["version"] for worker in status["workers"]] == ["1.37", "-"]
    assert status["lag_histogram"] == {"0": 400, "1": 4000, "2": 720}
    assert status["by_lag"]["0"] == pytest.approx(
        {"trajectories": 400, "tokens": 10_000, "reward_mean": 0.1 + 0.25 + 26.5 / 60, "ratio_mean": 1.0, "ess": 1.0}
    )
    assert status["throughput"] == {"generated_tokens_per_s": 5000.0, "trained_tokens_per_s": 2000.0}
    assert status["queues"]["ready"] == 12
    assert status["ages"] == {
        "oldest_ready_s": 7.5,
        "mean_ready_s": 2.5,
        "oldest_lease_s": 3.0,
        "next_sample_s": None,
    }
    assert "recent_steps" not in status
    assert set(status["last_step"]) == set(StepMetrics.__struct_fields__) - {"agent"}  # no agent plays

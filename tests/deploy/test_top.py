"""`headway top` obeys a user's keys: a real run on a real server, whose workers the test scripts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from headway.broker import BlockingBroker, Broker
from headway.broker.client.supervision import LearnerInfo
from headway.broker.errors import BrokerUnavailableError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import DeadLetter, PoolInfo, RunStatus
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.cli.top import Top, dismisser, scaler
from headway.deploy.observe.bottleneck import Bottleneck, read_status
from headway.deploy.observe.live import changes
from tests.broker.scenario import Scenario, begin, rules
from tests.broker.test_access import admit, url_of

from .runs import run_status, step_metrics, worker
from .test_cli import headway

ALIVE_S = 60.0
DEADLINE_S = 240.0


@pytest.fixture
async def run(broker: Broker) -> Scenario:
    """Return a run with a learner, two workers and two pools."""
    scenario = await begin(broker, rules(1), fed=8)
    await broker.status.set_state(scenario.owner, "training")
    await broker.heartbeat.begin(LearnerInfo(host="node", pid=7, user="ali", since=0.0))
    await scenario.announce(1)
    await broker.status.report_step(scenario.owner, step_metrics(0))
    for name in ("w1", "w2"):
        await broker.status.heartbeat(worker(name, WeightVersion(1, 0)), ALIVE_S)
    for pool in ("big", "small"):
        await broker.pools.report(PoolInfo(pool=pool, host="h", pid=7, running=2), 2, ALIVE_S)
    return scenario


@pytest.fixture
async def app(url: str, run: Scenario) -> AsyncIterator[Top]:
    client = BlockingBroker(url, run.broker.run)
    name = run.broker.run
    yield Top(
        "first at here",
        lambda: client.call(read_status(client.broker)),
        scaler(url, name),
        dismisser(url, name),
        every_s=0.05,
    )
    client.close()


def screen(app: Top) -> str:
    """Return the text of all widgets, with single spaces."""
    texts = [str(app.query_one(name, Static).content) for name in ("#head", "#waits")]
    for name in ("#workers", "#pools"):
        table = app.query_one(name, DataTable)
        texts += [" ".join(str(cell) for cell in table.get_row_at(row)) for row in range(table.row_count)]
    events = (line.text for line in app.query_one("#events", RichLog).lines)
    return " ".join(" ".join([*texts, *events]).split())


async def until(pilot: Pilot[None], app: Top, is_so: Callable[[str], bool]) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so(shown := screen(app)):
            await pilot.pause(0.02)
    return shown


async def test_it_shows_who_does_what_and_what_happens(app: Top, run: Scenario) -> None:
    async with app.run_test(size=(140, 40)) as pilot:
        shown = await until(pilot, app, lambda text: "w2" in text)
        for part in (
            "first at here: training, incarnation 1, version 1.1",
            "step 1 of 60, reward 0.500, lag 1.25 (max 2), learner waiting 25%",
            "5,000 tokens/s generated, 2,000 trained",
            "groups: 8 waiting, 0 generating, 0 ready, 0 taken",
            "The learner waits for step 2: 0 of 2 groups are ready",
            "w1 node generating 1.0 1 60/64 2,500 2,000",
            "big 2 2 0 0",
        ):
            assert part in shown, part
        await run.broker.status.leave("w1")
        await run.announce(2)
        shown = await until(pilot, app, lambda text: "Worker w1 left." in text and "Version 1.2 announced." in text)
        assert "w1 node" not in shown


async def test_a_long_error_hides_no_other_column(app: Top, run: Scenario) -> None:
    error = "connection closed by peer " * 20 + "\nsecond line"
    async with app.run_test(size=(100, 40)) as pilot:
        await run.broker.status.heartbeat(worker("w1", WeightVersion(1, 0), last_error=error), ALIVE_S)
        shown = await until(pilot, app, lambda text: "connection closed by peer" in text)
        table = app.query_one("#workers", DataTable)
        *figures, errors = table.ordered_columns
        assert f"{errors.label}" == "error"
        assert sum(column.get_render_width(table) for column in figures) < 100
        assert "w1 node generating 1.0" in shown
        assert "second line" not in f"{table.get_row_at(0)}"


async def test_plus_and_minus_scale_the_pool_under_the_cursor(app: Top, run: Scenario) -> None:
    async def wanted() -> dict[str, int]:
        return {pool.pool: pool.wanted for pool in (await run.broker.status.snapshot()).pools}

    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, app, lambda text: "small 2" in text)
        await pilot.press("plus")
        await until(pilot, app, lambda text: "Pool big: 3 wanted, 2 before." in text and "big 3" in text)
        assert await wanted() == {"big": 3, "small": 2}
        await pilot.press("down", "minus")
        await until(pilot, app, lambda text: "Pool small: 1 wanted, 2 before." in text)
        assert await wanted() == {"big": 3, "small": 1}


async def test_d_drains_and_x_quarantines_the_worker_under_the_cursor_once_confirmed(app: Top, run: Scenario) -> None:
    status = run.broker.status
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, app, lambda text: "w2" in text)
        app.query_one("#workers").focus()
        await pilot.press("down", "x", "n", "d", "escape", "y", "x")
        assert app.query_one("#question").display
        assert "Let worker w2 have no more samples?" in str(app.query_one("#question", Static).content)
        assert (await status.snapshot()).quarantined == ()
        await pilot.press("y")
        await until(pilot, app, lambda text: "No more leases for: w2." in text)
        assert (await status.snapshot()).quarantined == ("w2",)
        assert not app.query_one("#question").display

        await pilot.press("up", "d", "down", "y")  # the question's worker, wherever the cursor went meanwhile
        await until(pilot, app, lambda text: "Asked to hand their work back and leave: w1." in text)
        assert (await status.heartbeat(worker("w1", WeightVersion(1, 0)), ALIVE_S)).must_drain

        await status.leave("w1")
        await until(pilot, app, lambda text: "w1 node" not in text)
        await pilot.press("d")
        await status.leave("w2")
        await pilot.press("y")
        await until(pilot, app, lambda text: "Worker w2 has left." in text)


async def test_the_cursor_stays_at_its_worker_when_another_joins(app: Top, run: Scenario) -> None:
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, app, lambda text: "w2" in text)
        app.query_one("#workers").focus()
        await pilot.press("down")
        await run.broker.status.heartbeat(worker("w0", WeightVersion(1, 0)), ALIVE_S)
        await until(pilot, app, lambda text: "w0 node" in text)
        await pilot.press("d")
        assert "Ask worker w2 to" in str(app.query_one("#question", Static).content)


@pytest.mark.parametrize("keys", [("plus",), ("d", "y")])
async def test_a_key_without_the_learners_password_says_so(
    keys: tuple[str, ...], app: Top, server: EmbeddedServer, run: Scenario
) -> None:
    observer = url_of(server, admit(server, run.broker.run)[Role.OBSERVER])
    app._scale, app._dismiss = scaler(observer, run.broker.run), dismisser(observer, run.broker.run)
    async with app.run_test(size=(300, 40)) as pilot:
        await until(pilot, app, lambda text: "small 2" in text)
        await pilot.press(*keys)
        await until(pilot, app, lambda text: "may not do this" in text)


async def test_question_mark_explains_the_keys_and_q_quits(app: Top) -> None:
    async with app.run_test(size=(140, 40)) as pilot:
        assert not app.query_one("#help").display
        await pilot.press("question_mark")
        assert app.query_one("#help").display
        await pilot.press("question_mark")
        assert not app.query_one("#help").display
        await pilot.press("q")
        assert not app.is_running or app._exit


async def test_a_server_that_is_away_is_told_once_and_does_not_end_it(app: Top, server: EmbeddedServer) -> None:
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, app, lambda text: "w2" in text)
        working, app._look = app._look, _away
        await until(pilot, app, lambda text: "No answer from the broker" in text)
        app._look = working
        shown = await until(pilot, app, lambda text: "w2" in text)
        assert shown.count("No answer from the broker") == 1


def _away() -> tuple[RunStatus, Bottleneck | None]:
    raise BrokerUnavailableError("No answer from the broker")


def test_what_changed_between_two_looks() -> None:
    before = run_status(1)
    assert list(changes(None, before)) == ["Training."]
    assert list(changes(before, before)) == []
    now = replace(
        run_status(2),
        state="finished",
        incarnation=2,
        workers=(replace(before.workers[0], last_error="cut off"), worker("w9", None)),
        quarantined=("w9",),
        pools=(PoolInfo(pool="big", host="h", pid=1, running=0, wanted=4),),
        dead_letters=(DeadLetter(tid="0-1:0:3", worker="w9", reason="too long"),),
        queues=replace(before.queues, expired_leases=7),
    )
    told = list(changes(before, now))
    assert told[2].startswith("step    2/60")
    assert [line for line in told if not line.startswith("step")] == [
        "Finished.",
        "Another learner took the run over, as incarnation 2.",
        "Version 1.2 announced.",
        "Worker node-worker-0-ab12: cut off",
        "Worker w9 joined.",
        "Worker node-worker-1-cd34 left.",
        "Worker w9 gets no more leases.",
        "Pool big: 4 workers wanted.",
        "Refused: 0-1:0:3 of w9: too long",
        "2 leases expired.",
    ]


def test_without_a_terminal_it_says_what_to_use_instead(tmp_path: Path) -> None:
    answer = headway("top", cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Loading, and looking for the run ...\n")
    assert "headway top needs a terminal; `headway status` prints one look" in answer.stderr

"""The commands as a user meets them: real processes, their exit codes, and every error as one paragraph."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from headway.broker import Broker
from headway.broker.schema import CheckpointMark, Owner, RunRules
from headway.broker.schema.status import PoolInfo
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.recipe.resolve import load_recipe, with_overrides
from headway.deploy.roles.standalone import _own_of
from headway.deploy.run.run_directory import held
from tests.broker.topologies import free_port

from .runs import step_metrics, worker

NOWHERE = "redis://127.0.0.1:1"


def headway(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `headway` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headway", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**clean_environment(), **environment},
        check=False,
    )


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")} | {"COLUMNS": "200"}


def run_main(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `main` in a process after `script`, which sees the command line as `cli`."""
    text = f"import sys\nimport headway.deploy.cli.main as cli\nsys.argv = ['headway', *{list(arguments)!r}]\n{script}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=cwd, check=False)


def test_help_imports_next_to_nothing(tmp_path: Path) -> None:
    script = """
for name in [None, *cli.cli.commands]:
    try: cli.cli.main([*[name][name is None:], "--help"], prog_name="headway")
    except SystemExit as ended: assert not ended.code
print([m for m in ("torch", "numpy", "redis", "omegaconf", "rich.console") if m in sys.modules])
"""
    answer = run_main(script, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Usage: headway") > 30
    assert answer.stdout.endswith("[]\n")


def test_help_names_no_internal_command(tmp_path: Path) -> None:
    text = headway("--help", cwd=tmp_path).stdout
    listed = {line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()}
    assert {"run", "learner", "workers", "status"} <= listed
    assert not {"worker", "scorer", "prepare"} & listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "There is no recipe 'nowhere.yaml'."),
        (["replay", "x"], "There is no run 'x': neither that directory nor the one below ./runs has a config.yaml."),
        (["status", "--broker", NOWHERE, "--run", "x"], f"No answer from the broker at {NOWHERE} "),
    ],
)
def test_errors_are_one_paragraph_and_exit_1(arguments: list[str], message: str, tmp_path: Path) -> None:
    answer = headway(*arguments, cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"Error: {message}")
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""


def test_a_worker_chooses_its_engine_and_how_it_is_connected() -> None:
    own = [
        "weights.follow=pull",
        "weights.archive=file:///mnt",
        "weights.pull_bytes_per_s=100000",
        "weights.pull_files=false",
        "engine.threads=3",
        "workers.metrics_port=9500",
    ]
    assert _own_of(own).engine.threads == 3
    recipe = with_overrides(load_recipe("arithmetic.yaml"), own)
    assert (recipe.weights.follow, recipe.weights.pull_bytes_per_s) == ("pull", 100_000)
    assert not recipe.weights.pull_files
    assert recipe.weights.archive == "file:///mnt"
    assert recipe.workers.metrics_port == 9500


def test_wrong_usage_exits_2(tmp_path: Path) -> None:
    answer = headway("status", "--learner.steps=5", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1] == "Error: No such option '--learner.steps'."


def test_debug_anywhere_adds_the_traceback(tmp_path: Path) -> None:
    for arguments in (["--debug", "run", "x.yaml"], ["run", "x.yaml", "--debug"]):
        answer = headway(*arguments, cwd=tmp_path)
        assert answer.returncode == 1
        assert answer.stderr.startswith("Traceback (most recent call last):")
        assert answer.stderr.splitlines()[-1].startswith("Error: There is no recipe 'x.yaml'.")


CRASH = "def crash(**_): raise {error}\ncli.cli.commands['doctor'].callback = crash\ncli.main()"


def test_a_bug_is_confessed_with_its_log(tmp_path: Path) -> None:
    answer = run_main(CRASH.format(error="ZeroDivisionError('division by zero')"), "doctor", cwd=tmp_path)
    assert answer.returncode == 70
    assert answer.stderr.startswith("Error: This is a bug in Headway")
    assert "ZeroDivisionError: division by zero" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    log = Path(next(word for word in answer.stderr.split() if "headway-bug-" in word).rstrip(";"))
    assert "raise ZeroDivisionError" in log.read_text() or "ZeroDivisionError: division by zero" in log.read_text()
    log.unlink()


def test_a_bug_shows_its_traceback_with_debug(tmp_path: Path) -> None:
    answer = run_main(CRASH.format(error="ValueError('x')"), "doctor", "--debug", cwd=tmp_path)
    assert answer.returncode == 70
    assert answer.stderr.startswith("Traceback")


def test_ctrl_c_exits_130_without_a_word(tmp_path: Path) -> None:
    answer = run_main(CRASH.format(error="KeyboardInterrupt"), "doctor", cwd=tmp_path)
    assert (answer.returncode, answer.stderr.strip()) == (130, "")


def test_the_broker_serves_until_told_to_stop_and_keeps_its_data(tmp_path: Path) -> None:
    port = free_port()
    arguments = [sys.executable, "-m", "headway", "broker", "--port", str(port), "--directory", "data"]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"redis://127.0.0.1:{port}"
        assert process.stdout.readline().startswith(f"Serving {url}, data in data.")
        urls = dict(exported(process.stdout) for _ in Role)
        assert sorted(urls) == sorted(Role)
        for role, given in urls.items():
            check = headway("broker", "--url", given, cwd=tmp_path)
            runs = "our user may not list them" if role in (Role.WORKER, Role.SCORER) else "none"
            assert (check.stdout, check.stderr) == (f"redis://***@127.0.0.1:{port} answers. Runs: {runs}.\n", "")
        stranger = headway("broker", "--url", url, cwd=tmp_path)
        assert "refuses our user or password" in stranger.stderr
        taken = headway("broker", "--port", str(port), "--directory", "other", cwd=tmp_path)
        assert taken.returncode == 1
        assert f"Port {port} on 127.0.0.1 is taken" in taken.stderr
        arguments[arguments.index(str(port))] = str(free_port())
        second = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert second.returncode == 1
        assert "Stop it first, or choose another directory (--directory)." in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert (tmp_path / "data").is_dir()


def exported(printed: IO[str]) -> tuple[str, str]:
    """Return the role, and the URL that the role's two lines give it."""
    (setting,) = [word for word in shlex.split(printed.readline()) if word.startswith("HEADWAY_BROKER=")]
    commands = {"learner": Role.LEARNER, "workers": Role.WORKER, "scorers": Role.SCORER, "status": Role.OBSERVER}
    return commands[printed.readline().split()[1]], setting.partition("=")[2]


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        ([], 0, "Warning: the server at {url} asks for no password. Anything that reaches its port"),
        (["appendonly no"], 0, "Warning: the server at {url} keeps no append-only file"),
        (["maxmemory-policy allkeys-lru"], 1, "Error: The server at {url} throws keys away once its memory is full"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(settings: list[str], code: int, told: str, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server", port=free_port(), settings=settings) as server:
        for arguments in (["broker", "--url", server.url], ["run", "arithmetic.yaml", f"broker.url={server.url}"]):
            if code or arguments[0] == "broker":
                answer = headway(*arguments, cwd=tmp_path)
                assert answer.returncode == code
                assert told.format(url=server.url) in answer.stderr


async def claimed(broker: Broker) -> Owner:
    """Return a run with a learner, one step and one worker."""
    rules = RunRules(
        max_lag=2,
        groups_per_step=32,
        on_straggler="wait",
        on_over_bound="requeue",
        max_bytes=1 << 20,
    )
    claim = await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"{}", resume=False)
    await broker.status.set_state(claim.owner, "training")
    await broker.status.report_step(claim.owner, step_metrics(0))
    await broker.status.heartbeat(worker("w-0", None), 60.0)
    return claim.owner


async def test_status_of_a_run(broker: Broker, server: EmbeddedServer, tmp_path: Path) -> None:
    await claimed(broker)
    answer = headway("status", "--json", cwd=tmp_path, HEADWAY_BROKER=server.url, HEADWAY_RUN=broker.run)
    assert answer.returncode == 0, answer.stderr
    status = json.loads(answer.stdout)
    assert (status["run"], status["state"], status["announced"]) == (broker.run, "training", "-")
    assert [info["worker"] for info in status["workers"]] == ["w-0"]
    only_run = headway("status", "--broker", server.url, cwd=tmp_path)
    assert broker.run in only_run.stdout
    assert "w-0" in only_run.stdout


@pytest.mark.slow
async def test_pools_and_workers_are_told_from_another_terminal(
    broker: Broker, server: EmbeddedServer, tmp_path: Path
) -> None:
    await claimed(broker)
    to_run = {"HEADWAY_BROKER": server.url, "HEADWAY_RUN": broker.run}
    none = headway("scale", "2", cwd=tmp_path, **to_run)
    assert "No supervisor of a pool is alive in run" in none.stderr
    pool = PoolInfo(pool="big", host="h", pid=7, running=1)
    assert await broker.pools.report(pool, 1, 60.0) == 1
    scaled = headway("scale", "+2", "--json", cwd=tmp_path, **to_run)
    assert json.loads(scaled.stdout) == {"run": broker.run, "pool": "big", "before": 1, "wanted": 3}
    assert await broker.pools.report(pool, 1, 60.0) == 3
    drained = headway("drain", "w-0", "w-9", cwd=tmp_path, **to_run)
    assert drained.returncode == 1
    assert drained.stdout == "Asked to hand their work back and leave: w-0.\n"
    assert f"No worker w-9 is alive in run {broker.run}. Its workers: w-0." in " ".join(drained.stderr.split())
    assert not (await broker.status.heartbeat(worker("w-1", None), 60.0)).must_drain
    doubtful = headway("quarantine", "w-", cwd=tmp_path, **to_run)
    assert (doubtful.returncode, doubtful.stdout) == (1, "")
    assert "w- may be any of w-0, w-1: give more of the name." in " ".join(doubtful.stderr.split())
    by_part = headway("drain", "1", "--json", cwd=tmp_path, **to_run)
    assert json.loads(by_part.stdout) == {"run": broker.run, "drain": ["w-1"], "unknown": []}
    for name in ("w-0", "w-1"):
        assert (await broker.status.heartbeat(worker(name, None), 60.0)).must_drain


def test_a_command_that_was_started_with_sigint_ignored_ends_at_it(tmp_path: Path) -> None:
    """As a script does with `headway dashboard &`."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: mine}\n")
    line = 'trap "" INT; exec "$0" -m headway dashboard runs/mine --port 0 --json'
    process = subprocess.Popen(
        ["sh", "-c", line, sys.executable], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=clean_environment()
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["url"].startswith("http://")
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, 130)
    process.stdout.close()


@pytest.mark.slow
async def test_scale_waits_until_the_workers_work(broker: Broker, server: EmbeddedServer, tmp_path: Path) -> None:
    await claimed(broker)

    async def report(working: int, given_up: int = 0) -> int | None:
        info = PoolInfo(pool="big", host="h", pid=7, running=2, working=working, given_up=given_up)
        return await broker.pools.report(info, 1, 60.0)

    async def scaling(number: str) -> "asyncio.Task[subprocess.CompletedProcess[str]]":
        to_run = {"HEADWAY_BROKER": server.url, "HEADWAY_RUN": broker.run}
        task = asyncio.create_task(
            asyncio.to_thread(headway, "scale", number, "--wait", "--json", cwd=tmp_path, **to_run)
        )
        while await report(1) != int(number):  # noqa: ASYNC110 - nothing announces what is wanted
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # all run by now, and one does not work
        return task

    await report(1)
    waits = await scaling("2")
    await report(2)
    assert json.loads((await waits).stdout)["pool_now"]["working"] == 2
    waits = await scaling("3")
    await report(2, given_up=1)
    assert (await waits).returncode == 1


def watching_status(url: str, run: str, cwd: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headway", "status", "--watch", "--json"]
    environment = {**clean_environment(), "HEADWAY_BROKER": url, "HEADWAY_RUN": run}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment
    )


async def test_a_watch_waits_for_the_run_and_tells_it_line_by_line(
    broker: Broker, server: EmbeddedServer, tmp_path: Path
) -> None:
    with watching_status(server.url, broker.run, tmp_path) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert "Waiting for it" in watching.stderr.readline()
        await claimed(broker)
        looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        watching.communicate()
    assert [look["state"] for look in looks] == ["training", "training"]
    assert watching.returncode == 130


@pytest.mark.slow
async def test_status_finds_the_run_that_is_going_on_here(
    broker: Broker, server: EmbeddedServer, tmp_path: Path
) -> None:
    await claimed(broker)
    (tmp_path / "runs" / broker.run).mkdir(parents=True)
    (tmp_path / "runs" / broker.run / "broker.json").write_text(json.dumps({"url": server.url, "run": broker.run}))
    with held(tmp_path / "runs" / broker.run):
        answer = headway("status", cwd=tmp_path)
        other = headway("status", "--run", "other", cwd=tmp_path)
        (tmp_path / "runs" / "newer").mkdir()
        (tmp_path / "runs" / "newer" / "broker.json").write_text(json.dumps({"url": NOWHERE, "run": "newer"}))
        with held(tmp_path / "runs" / "newer"):
            older = headway("status", "--run", broker.run, cwd=tmp_path)
    assert f"{broker.run}: training, incarnation 1" in older.stdout, older.stderr
    assert answer.returncode == 0, answer.stderr
    assert f"{broker.run}: training, incarnation 1" in answer.stdout
    assert other.stderr == (
        f"Error: The run that is going on here is {broker.run}, not other; name the server with --broker.\n"
    )


async def test_status_of_an_unknown_run_lists_those_there_are(
    broker: Broker, server: EmbeddedServer, tmp_path: Path
) -> None:
    await claimed(broker)
    answer = headway("status", "--broker", server.url, "--run", "other", cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"Error: No run other at {server.url}. Runs there: {broker.run}.")
    assert "--watch" in answer.stderr
    answer = headway("scale", "+1", "--broker", server.url, "--run", "other", cwd=tmp_path)
    assert answer.stderr.startswith(f"Error: No run other at {server.url}. Runs there: {broker.run}.")
    assert "--watch" not in answer.stderr


def test_one_algorithm_in_full(tmp_path: Path) -> None:
    answer = headway("algorithms", "gspo", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for text in ("preset gspo", "objective gspo", "clip_low 0.0003", "aggregation sequence_mean", "arXiv:2507.18071"):
        assert text in answer.stdout
    listed = json.loads(headway("algorithms", "--json", cwd=tmp_path).stdout)["algorithms"]
    assert {"grpo", "ppo", "online_dpo", "distillation", "ppo_clip"} <= {one["name"] for one in listed}
    wrong = headway("algorithms", "gsop", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "did you mean 'gspo'?" in wrong.stderr

"""Workers of `headway generate --workers` share the prompts and join; they may be killed, and so may the writer."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headway.broker import BlockingBroker, open_broker
from headway.broker.client.supervision import LearnerInfo
from headway.broker.schema import CheckpointMark, RunRules, WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.cli.main import answer
from headway.deploy.recipe.resolve import recipe_from_bytes, recipe_to_bytes
from headway.deploy.roles.batch_inference import Answer, AnswerFile, AnswersError
from headway.deploy.roles.batch_inference_workers import generation_recipe, run_name
from headway.deploy.roles.prewarmed_engine import PrewarmedEngine
from headway.deploy.roles.trained_model import PoolSettings, TrainedModel
from headway.deploy.roles.worker import _fetch_config, _work
from headway.rollout_workers.config import SamplingConfig
from tests.processes import kill

from .tiny_model import make_model

MANY = 200
SLOW = ("engine.max_model_len=64", "sampling.max_new_tokens=48", "engine.max_concurrent=4")
LEASE = "broker.lease_ttl_s=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(count)))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that another process may be writing."""
    return [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()] if path.exists() else []


def until(is_so: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while not is_so():
        assert process.poll() is None, "the process has ended before it was killed"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_workers_and_a_killed_writer_lose_no_prompt_and_answer_none_twice(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out, whole = write(tmp_path / "p.jsonl", MANY), tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", str(model), str(prompts), "--out", str(out)]
    logs = tmp_path / "a.jsonl.logs"
    writer = subprocess.Popen([sys.executable, "-m", "headway", *arguments, "--workers", "2", *SLOW, LEASE])
    until(lambda: sum("pulled" in log.read_text() for log in logs.glob("worker-*.log")) == 2, writer)
    processes = psutil.Process(writer.pid).children(recursive=True)
    next(one for one in processes if "worker-0" in one.cmdline()).kill()
    # The killed worker held four prompts, so another one has answered some of these by then.
    until(lambda: len(lines(out)) >= MANY - 3, writer)
    writer.kill()
    writer.wait()
    psutil.wait_procs(processes, timeout=240)
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    found = Counter(line["index"] for line in lines(out))
    assert max(found.values()) == 1
    assert len(found) >= MANY - 3
    assert not answer([*arguments, *SLOW, "--json"])
    assert json.loads(capsys.readouterr().out)["found"] == len(found)
    assert not answer([*arguments[:-1], str(whole), *SLOW])
    assert out.read_bytes() == whole.read_bytes()


@contextmanager
def worker_elsewhere(url: str, run: str, private: Path) -> Iterator[None]:
    """Start a worker that gets only the broker's URL and the name of the run. It leaves at the end of the run."""

    async def work() -> None:
        broker = await open_broker(url, run)
        try:
            ahead = PrewarmedEngine(run, "elsewhere-0", (), (), private)
            recipe = recipe_from_bytes(await _fetch_config(broker, ahead))
            await _work(broker, recipe, recipe, "elsewhere-0", private, asyncio.Event(), ImportRoots(), ahead)
        finally:
            await broker.close()

    private.mkdir()
    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    yield
    thread.join(240)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_worker_that_joined_by_the_url_goes_on_for_the_next_writer(
    model: Path,
    server: EmbeddedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first writer ends at its eleventh line and leaves its run on the server, as a killed one does.

    A worker that has leased prompts of it is never heard of again.
    """
    prompts, out, whole = write(tmp_path / "p.jsonl", 40), tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", str(model), str(prompts), "--samples", "2", *SLOW, "--out"]
    by_workers = [*arguments, str(out), "--broker", server.url, "--run", "job", LEASE]
    add = AnswerFile.add

    def add_ten(file: AnswerFile, one: Answer) -> None:
        if len(file.done) == 10:
            monkeypatch.setattr(AnswerFile, "add", add)
            lease_some(server.url)
            raise AnswersError("The disk is gone.")
        add(file, one)

    monkeypatch.setattr(AnswerFile, "add", add_ten)
    with worker_elsewhere(server.url, "job", tmp_path / "private"):
        assert answer(by_workers) == 1
        assert "The disk is gone." in capsys.readouterr().err
        assert len(lines(out)) == 10
        with another_writer(server.url):
            assert answer(by_workers) == 1
        assert f"Run job is in use (training): its learner is process {os.getppid()}" in one_line(capsys)
        assert not answer([*by_workers, "--json"])
    assert json.loads(capsys.readouterr().out)["found"] == 10
    assert not answer([*arguments, str(whole)])
    assert out.read_bytes() == whole.read_bytes()
    with closing(BlockingBroker(server.url, "other")) as left:
        assert left.call(left.broker.status.runs()) == ()


@contextmanager
def another_writer(url: str) -> Iterator[None]:
    """Pretend that another living process answers the same prompts in the run."""
    with closing(BlockingBroker(url, "job")) as blocking:
        holding = blocking.broker.heartbeat
        blocking.call(holding.begin(msgspec.structs.replace(LearnerInfo.this_process(), pid=os.getppid())))
        yield
        blocking.call(holding.end())


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_server_that_starts_again_without_its_data_costs_no_prompt(
    model: Path,
    server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, out, whole = write(tmp_path / "p.jsonl", 40), tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", str(model), str(prompts), *SLOW, "--out"]
    add = AnswerFile.add

    def add_and_kill(file: AnswerFile, one: Answer) -> None:
        add(file, one)
        if len(file.done) == 10:
            kill(server)
            shutil.rmtree(tmp_path / "server" / "appendonlydir")
            server.start()

    monkeypatch.setattr(AnswerFile, "add", add_and_kill)
    with worker_elsewhere(server.url, "job", tmp_path / "private"):
        assert not answer([*arguments, str(out), "--broker", server.url, "--run", "job", LEASE])
    monkeypatch.setattr(AnswerFile, "add", add)
    assert not answer([*arguments, str(whole)])
    assert out.read_bytes() == whole.read_bytes()


def lease_some(url: str) -> None:
    """Lease prompts of the run, as a worker does that is killed then."""
    with closing(BlockingBroker(url, "job")) as dead:
        reply = dead.call(dead.broker.leases.lease("dead-0", WeightVersion(1, 0), 5, 1.0))
        assert reply.leases


def test_another_run_of_the_name_is_left_alone(
    model: Path, server: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write(tmp_path / "p.jsonl", 3), tmp_path / "a.jsonl"
    rules = RunRules(max_lag=2, groups_per_step=32)
    with closing(BlockingBroker(server.url, "job")) as other:
        claim = other.broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"{}", resume=False)
        other.call(claim)
        other.call(other.broker.heartbeat.begin(LearnerInfo.this_process()))
        assert answer(["generate", str(model), str(prompts), "--out", str(out), "--broker", server.url, "--run", "job"])
    assert "Run job is in use (claimed): its learner is process" in " ".join(capsys.readouterr().err.split())
    assert not lines(out)


def test_greedy_is_a_choice_among_one_token() -> None:
    def sampling(temperature: float) -> SamplingConfig:
        chosen = SamplingConfig(top_k=7)
        settings = PoolSettings(sampling=msgspec.structs.replace(chosen, temperature=temperature))
        model = TrainedModel(path=Path("m"), recipe=None)
        recipe = generation_recipe(model, settings, run="job", samples=1, seed=3)
        return recipe_from_bytes(recipe_to_bytes(recipe)).sampling

    assert sampling(0.0) == SamplingConfig(temperature=1.0, top_k=1, seed=3)
    assert sampling(0.7) == SamplingConfig(temperature=0.7, top_k=7, seed=3)


def test_a_file_that_is_continued_has_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_name(Path("a.jsonl")) == run_name(tmp_path / "a.jsonl") != run_name(Path("b.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers 0 needs --broker"),
        (["--run", "job"], "--run needs --workers or --broker."),
        (["--workers", "2", "--shard", "1/2"], "--shard and --workers exclude each other"),
        (["workers.devices=[0]"], "override: unknown key workers"),
        (["--workers", "1", "workers.cout=2"], "override: unknown key workers.cout; did you mean workers.count?"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "p.jsonl", 1)
    assert answer(["generate", str(model), str(prompts), "--out", str(tmp_path / "a.jsonl"), *options])
    assert message in capsys.readouterr().err

"""A worker that cannot open one of its parts closes those that it has opened."""

import asyncio
import socket
import threading
from pathlib import Path

import psutil
import pytest

from headway.broker.client.broker import Broker, open_broker
from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.prewarmed_engine import PrewarmedEngine
from headway.deploy.roles.worker import _work, work
from headway.rollout_workers.model_download import FetchedModel

from .test_scorers import begin
from .tiny_model import make_model

MINE = """
class Closed:
    def __init__(self):
        raise OSError("the sandbox is not there")


def score(prompts, completions, **kwargs):
    return [1.0] * len(prompts)
"""


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def engines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headway-engine"}


@pytest.mark.parametrize("what", ["environment", "metrics"])
async def test_a_worker_that_cannot_open_a_part_closes_the_others(
    what: str, server: EmbeddedServer, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed_parts.py").write_text(MINE)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    model = make_model(tmp_path / "model")

    async def fetched(broker: object, private: Path) -> FetchedModel:
        return FetchedModel(model, (18,))

    monkeypatch.setattr("headway.rollout_workers.model_download.fetch_model", fetched)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("headway.deploy.observe.prometheus.worker_metrics.PORTS", 1)
        wrong = {
            "environment": ["environment.kind=closed_parts:Closed"],
            "metrics": [f"workers.metrics_port={taken.getsockname()[1]}", "workers.metrics_host=127.0.0.1"],
        }
        named = ["rewards=[{kind: 'closed_parts:score'}]", *wrong[what]]
        recipe = load_recipe("arithmetic.yaml", [f"run.name={run_name}", "engine.max_model_len=64", *named])
        before = processes(), engines()
        broker = await open_broker(server.url, run_name)
        ahead = PrewarmedEngine(run_name, "w-0", (), (), tmp_path)
        refusal = {"environment": (HeadwayError, "the sandbox is not there"), "metrics": (ConfigError, "port")}
        try:
            with pytest.raises(refusal[what][0], match=refusal[what][1]):
                await _work(
                    broker, recipe, recipe, "w-0", tmp_path, asyncio.Event(), ImportRoots(("closed_parts",)), ahead
                )
        finally:
            await broker.close()
    assert (processes(), engines()) == before


class Engine:
    """An engine that cannot be closed, which notes the try."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    async def close(self) -> None:
        self._closed.append("engine")
        raise OSError("the engine hangs")


@pytest.mark.parametrize(
    ("what", "refusal", "others"), [("environment", "sandbox", ["subscriber"]), ("tracing", "no traces", [])]
)
async def test_an_engine_is_closed_first_and_its_error_does_not_hide_the_refusal(
    what: str,
    refusal: str,
    others: list[str],
    server: EmbeddedServer,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "closed_parts.py").write_text(MINE)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    model, closed = make_model(tmp_path / "model"), list[str]()

    async def fetched(broker: object, private: Path) -> FetchedModel:
        return FetchedModel(model, (18,))

    async def close(subscriber: object) -> None:
        closed.append("subscriber")

    def untraced(run: str, worker: str) -> None:
        raise HeadwayError("no traces")

    monkeypatch.setattr("headway.rollout_workers.model_download.fetch_model", fetched)
    monkeypatch.setattr("headway.weightsync.subscriber.Subscriber.close", close)
    monkeypatch.setattr("headway.deploy.roles.worker.open_worker_engine", lambda *arguments: Engine(closed))
    if what == "tracing":
        monkeypatch.setattr("headway.deploy.observe.tracing.open_sample_traces", untraced)
    recipe = load_recipe("arithmetic.yaml", [f"run.name={run_name}", "environment.kind=closed_parts:Closed"])
    broker = await open_broker(server.url, run_name)
    ahead, roots = PrewarmedEngine(run_name, "w-0", (), (), tmp_path), ImportRoots(("closed_parts",))
    try:
        with pytest.raises(HeadwayError, match=refusal):
            await _work(broker, recipe, recipe, "w-0", tmp_path, asyncio.Event(), roots, ahead)
    finally:
        await broker.close()
    assert closed == ["engine", *others]
    assert "Engine cannot be closed: OSError: the engine hangs" in caplog.text


def test_an_environment_that_cannot_be_opened_may_be_opened_at_another_start(
    server: EmbeddedServer, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed_parts.py").write_text(MINE)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))

    async def claim() -> None:
        broker = Broker(server.url, run_name)
        await begin(broker, tmp_path)
        await broker.close()

    asyncio.run(claim())
    model = f"model.path={tmp_path}/policy", "engine.max_model_len=64", "sampling.max_new_tokens=8"
    kinds = "prompts.kind=arithmetic", "environment.kind=closed_parts:Closed", "rewards=[{kind: 'closed_parts:score'}]"
    with pytest.raises(ConfigError, match="the sandbox is not there") as caught:
        work(server.url, run_name, "w-0", (*model, *kinds), ("closed_parts",))
    assert caught.value.exit_code == HeadwayError.exit_code

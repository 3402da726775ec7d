"""A worker opens its engine before the learner has claimed the run, and goes on with it only if it is the run's own."""

from pathlib import Path

import pytest

from headway.broker.errors import LASTING_EXIT, ConfigError
from headway.broker.schema.weights import ModelFiles
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.launch.base import PREWARM
from headway.deploy.recipe.placement import opens_beside_learner
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.roles.config_watch import lasting_config_errors
from headway.deploy.roles.prewarmed_engine import PrewarmedEngine
from headway.deploy.roles.worker import _private_directory
from headway.learner.models.model_files import model_files
from headway.rollout_workers.model_download import write_model

SIZED = "engine.options={kv_cache_memory_bytes: 1000000000}"
WIDER = "model.random.config.moe_intermediate_size=32"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Put the recipe of a run where its workers look for it."""
    found = load_recipe("arithmetic.yaml", (f"run.directory={tmp_path}", "run.name=r"))
    (tmp_path / "config.yaml").write_text(dump_recipe(found))
    monkeypatch.setenv(PREWARM, str(tmp_path / "config.yaml"))
    return found


def stored(recipe: Recipe, directory: Path) -> Path:
    """Write the files that the recipe's learner stores in the broker, as a worker does that fetches them."""
    files = model_files(recipe.model)
    return write_model(ModelFiles(files=dict(files.files)), directory)


def ahead(private: Path, *overrides: str) -> PrewarmedEngine:
    return PrewarmedEngine("r", "host-0", overrides, (), private)


async def test_the_worker_goes_on_with_the_engine_that_it_has_opened(recipe: Recipe, tmp_path: Path) -> None:
    opened = ahead(tmp_path)
    await opened.open()
    engine = await opened.taken(recipe, ImportRoots(), stored(recipe, tmp_path / "model"), 0)
    assert engine is not None
    assert engine.max_model_len == recipe.engine.max_model_len
    await opened.close()  # the engine is the worker's now, and goes on
    assert await opened.taken(recipe, ImportRoots(), tmp_path / "model", 0) is None
    assert len(await engine.score([1, 2])) == 1
    await engine.close()


@pytest.mark.parametrize("other", ["run.seed=5", "engine.max_concurrent=3", "engine.max_model_len=65", WIDER])
async def test_an_engine_for_another_run_is_closed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    opened = ahead(tmp_path)
    await opened.open()
    assert opened._opened is not None
    closed: list[bool] = []
    monkeypatch.setattr(type(opened._opened.engine), "close", _noting(closed))
    now = load_recipe(tmp_path / "config.yaml", (other,))
    assert await opened.taken(now, ImportRoots(), stored(now, tmp_path / "model"), 0) is None
    assert closed == [True]


async def test_an_engine_that_cannot_be_closed_gives_way_to_another_one(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = ahead(tmp_path)
    await opened.open()
    assert opened._opened is not None
    engine, close = opened._opened.engine, opened._opened.engine.close
    monkeypatch.setattr(engine, "close", _hanging)
    now = load_recipe(tmp_path / "config.yaml", ("run.seed=5",))
    assert await opened.taken(now, ImportRoots(), stored(now, tmp_path / "model"), 0) is None
    assert "cannot be closed: OSError: the engine hangs" in caplog.text
    await close()


async def test_an_error_of_closing_does_not_hide_a_refusal(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closing = []

    async def refused() -> None:
        async with _private_directory("r", "host-0", (), ()) as (_, opened):
            await opened.open()
            assert opened._opened is not None
            closing.append(opened._opened.engine.close)
            monkeypatch.setattr(opened._opened.engine, "close", _hanging)
            with lasting_config_errors():
                raise ConfigError("no such worker")

    with pytest.raises(ConfigError, match="no such worker") as caught:
        await refused()
    assert caught.value.exit_code == LASTING_EXIT
    assert "cannot be closed: OSError: the engine hangs" in caplog.text
    await closing[0]()


async def test_none_is_opened_without_a_recipe_or_with_one_that_is_wrong(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("run: {name: r}\nmodel: {path: /nowhere}", "nonsense: 1", "{"):
        (tmp_path / "config.yaml").write_text(text)
        opened = ahead(tmp_path)
        await opened.open()
        assert await opened.taken(recipe, ImportRoots(), tmp_path, 0) is None
    monkeypatch.delenv(PREWARM)
    opened = ahead(tmp_path)
    await opened.open()
    assert await opened.taken(recipe, ImportRoots(), tmp_path, 0) is None


@pytest.mark.parametrize(
    ("overrides", "visible", "is_so"),
    [
        ((), "", True),
        (("learner.device=cuda",), "", False),
        (("learner.device=cuda", "engine.device=cpu"), "", True),
        (("learner.device=cuda", "workers.devices=[1,2]"), "", True),
        (("learner.device=cuda", "workers.devices=[1,2]", "learner.processes=2"), "", False),
        (("learner.device=cuda", "workers.devices=[1,2]"), "2,3", False),
        (("learner.device=cuda", "workers.devices=[1,2]"), "3,1,2", True),
        (("learner.device=cuda", "run.placement=colocated", "workers.count=1"), "", False),
        (("learner.device=cuda", "engine.kind=vllm"), "", False),
        (("learner.device=cuda", "engine.kind=vllm", SIZED), "", True),
        (("learner.device=cuda", "engine.kind=vllm", SIZED, "run.placement=colocated", "workers.count=1"), "", False),
    ],
)
def test_no_engine_measures_a_gpu_beside_a_learner_that_loads(
    overrides: tuple[str, ...], visible: str, is_so: bool
) -> None:
    recipe = load_recipe("arithmetic.yaml", ("engine.device=cuda", *overrides))
    assert opens_beside_learner(recipe, visible) is is_so


async def _hanging() -> None:
    raise OSError("the engine hangs")


def _noting(closed: list[bool]) -> object:
    async def close(self: object) -> None:
        closed.append(True)

    return close

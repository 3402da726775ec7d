"""A worker of `headway run` opens its engine while the learner still loads its model, instead of after it.

    the run's directory ──recipe──► engine opens ──────────┐
    learner loads, claims ──► configuration, model's files ─┴─► the same? yes: the worker goes on with this engine
                                                                          no: it closes it and opens another one

The broker alone decides what a worker works on: until it has said so, the engine has no weights and samples nothing.
"""

import asyncio
import logging
import os
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headway.broker.errors import HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.launch.base import PREWARM
from headway.deploy.recipe.adapter_support import adapters_held, rank_for_worker
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe, with_overrides
from headway.deploy.recipe.trust import check_stored
from headway.deploy.run.stage_output import after_stages

from .config_watch import lasting_config_errors

if TYPE_CHECKING:
    from headway.rollout_workers.engines.base import Engine


log = logging.getLogger(__name__)


def sent_rank(of_run: Recipe, recipe: Recipe, model: Path, roots: ImportRoots) -> int:
    """Return the rank of the adapters that a worker with this recipe is sent in the run of the other one, on the files
    in `model`; 0: whole weights. Raises UnfitEngineError if its engine does not take them."""
    from headway.learner.config import ModelConfig
    from headway.learner.models.pretrained import load_config

    return rank_for_worker(of_run, recipe.engine, load_config(ModelConfig(path=str(model))), roots)


def open_worker_engine(recipe: Recipe, model: Path, worker: str, roots: ImportRoots, adapter_rank: int) -> "Engine":
    """Open the recipe's engine on the files in `model`. vLLM wants the event loop's own thread."""
    from headway.rollout_workers.engines import open_engine

    return open_engine(
        recipe.engine,
        model,
        seed=_seed(recipe, worker),
        tells_experts=recipe.algorithm.router_replay,
        sleeps=recipe.run.is_colocated,
        adapter_rank=adapter_rank,
        adapters_held=adapters_held(recipe),
        roots=roots,
    )


@dataclass(frozen=True)
class _Opened:
    engine: "Engine"
    settings: tuple[Any, ...]
    model: Path


class PrewarmedEngine:
    """The engine that a worker has opened before the learner claimed the run, if it could."""

    def __init__(self, run: str, worker: str, overrides: Sequence[str], allowed: Sequence[str], private: Path) -> None:
        self._run, self._worker = run, worker
        self._overrides, self._allowed = overrides, allowed
        self._directory = private / "ahead"
        self._opened: _Opened | None = None
        self._preparing: asyncio.Future[tuple[Recipe, ImportRoots, int] | None] | None = None

    async def open(self) -> None:
        """Open an engine, where the environment names the run's recipe. Raises HeadwayError if the engine cannot."""
        path = os.environ.get(PREWARM)
        if not path:
            return
        self._preparing = asyncio.ensure_future(asyncio.to_thread(self._prepared, path))
        found = await asyncio.shield(self._preparing)
        if found is not None:
            recipe, roots, rank = found
            with lasting_config_errors():
                engine = open_worker_engine(recipe, self._directory, self._worker, roots, rank)
            self._opened = _Opened(engine, _settings(recipe, roots, rank), self._directory)
            log.info("worker %s: engine %s is up; waiting for the learner", self._worker, recipe.engine.kind)

    async def taken(self, recipe: Recipe, roots: ImportRoots, model: Path, rank: int) -> "Engine | None":
        """Return the engine if it is the one that would be opened for the run as the broker describes it; else close
        it. The caller closes what it gets."""
        opened = self._opened
        if opened is None:
            return None
        if opened.settings != _settings(recipe, roots, rank) or _contents(opened.model) != _contents(model):
            log.warning("worker %s: the run is another one than its directory says; opening an engine", self._worker)
            await self.close()
            return None
        self._opened = None
        return opened.engine

    async def close(self) -> None:
        """Close an engine that was not taken, once no thread writes into the directory any more. Idempotent; it logs
        an error of closing, as `close_part` does."""
        if self._preparing is not None:
            await asyncio.wait([self._preparing])
        opened, self._opened = self._opened, None
        if opened is not None:
            await close_part(opened.engine)

    def _prepared(self, path: str) -> tuple[Recipe, ImportRoots, int] | None:
        """Return the recipe, and the rank of the adapters that the engine takes, with the model's files written; None
        if that cannot be. Whatever is wrong with the recipe, the learner will tell."""
        from headway.learner.models.model_files import model_files
        from headway.rollout_workers.model_download import write_model

        with suppress(HeadwayError, OSError):
            of_run = after_stages(load_recipe(path, (f"run.name='{self._run}'",)))
            recipe = with_overrides(of_run, self._overrides)
            roots = check_stored(recipe, self._overrides, self._allowed)
            write_model(model_files(recipe.model), self._directory)
            return recipe, roots, sent_rank(of_run, recipe, self._directory, roots)
        return None


def _settings(recipe: Recipe, roots: ImportRoots, rank: int) -> tuple[Any, ...]:
    """Return what decides which engine a worker opens, besides its name and the model's files."""
    asked = recipe.algorithm.router_replay, recipe.run.is_colocated, rank, adapters_held(recipe)
    return recipe.engine, recipe.run.seed, *asked, roots


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _seed(recipe: Recipe, worker: str) -> int:
    """Return the worker's seed. Workers must not sample the same tokens; the same worker name gives the same seed."""
    return zlib.crc32(f"{recipe.run.seed}:{worker}".encode())


class WorkerPart(Protocol):
    """A worker's engine, or what it opens beside that."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=WorkerPart | None)


@asynccontextmanager
async def closing_parts(engine: WorkerPart) -> AsyncIterator[list[WorkerPart]]:
    """Yield the worker's parts, to which the block adds what it opens, and close those that are left in it then.

    The engine is closed first, since a colocated learner waits for its memory. An error of closing is logged: a part is
    left where another error is under way, which is the one to tell.
    """
    opened = [engine]
    try:
        yield opened
    finally:
        async with AsyncExitStack() as closing:
            for part in reversed(opened):
                closing.push_async_callback(close_part, part)


async def close_part(part: WorkerPart) -> None:
    """Close the part. An error of closing is logged, since it would hide the error that is under way."""
    try:
        await part.close()
    except Exception as error:  # noqa: BLE001 - a user's own engine may raise anything
        log.warning("%s cannot be closed: %s: %s", type(part).__name__, type(error).__name__, error)


def closed_by(opened: list[WorkerPart], part: P) -> P:
    """Add this part of a worker, if there is one, to those that are closed, and return it."""
    if part is not None:
        opened.append(part)
    return part

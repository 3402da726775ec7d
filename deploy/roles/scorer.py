"""The scorer role: one process with one model that scores responses. It is given only a broker URL and a run name.

Workers and evaluations reach the scorers of reward models and of the teacher by the clients below."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from headway.broker.client.broker import Broker, open_broker
from headway.broker.schema.status import ScorerInfo
from headway.broker.user_code.import_paths import ImportRoots, import_directory
from headway.deploy.recipe.pools import REWARD_MODEL, Scorer, scorer_named, scorers_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import recipe_from_bytes, with_overrides
from headway.deploy.recipe.trust import check_stored_scorers, roots_of_scorers
from headway.rollout_workers.config import RewardConfig

from .config_watch import (
    Signals,
    drain_when_asked,
    drained_when_changed,
    fetch_config,
    lasting_config_errors,
    unless_drained,
)

if TYPE_CHECKING:
    from headway.rollout_workers.rewards import ScorerOpener
    from headway.rollout_workers.samples.teacher_client import TeacherClient
    from headway.rollout_workers.scorers import TokenScorer


LOADING_S = 600.0
"""Seconds for which a scorer that loads its model counts as alive without a word; the server keeps to two minutes."""

log = logging.getLogger(__name__)


def score(url: str, run: str, process: str, name: str, overrides: Sequence[str], session: str = "") -> bool:
    """Answer the requests for scorer `name` (empty: the run's only one) until the run is over, or until SIGTERM or
    SIGINT drains this process. `session`: the secret by which its supervisor can hand its requests back; empty: one of
    its own. Returns whether such a signal came. Raises HeadwayError."""
    signals = Signals()
    return signals.run(_run(url, run, process, name, overrides, session, signals))


async def _run(
    url: str, run: str, process: str, name: str, overrides: Sequence[str], session: str, signals: Signals
) -> None:
    drain = asyncio.Event()
    signals.drain(drain)
    broker = await open_broker(url, run, session=session)
    broker.end_when(drain.is_set)
    try:
        stored = await unless_drained(fetch_config(broker), drain)
        if stored is None:
            return
        with lasting_config_errors():
            recipe = with_overrides(recipe_from_bytes(stored), overrides)
            roots = check_stored_scorers(recipe, overrides)
            scorer = scorer_named(recipe, name)

        def part(config: bytes) -> object:
            now = recipe_from_bytes(config)
            return scorer_named(now, scorer.name), now.scorers, now.model, _limits(now, scorer)

        async with drained_when_changed(broker, stored, drain, part):
            await _serve(broker, recipe, scorer, process, drain, roots)
    finally:
        await broker.close()


async def _serve(
    broker: Broker,
    recipe: Recipe,
    scorer: Scorer,
    process: str,
    drain: asyncio.Event,
    roots: ImportRoots,
) -> None:
    from headway.rollout_workers.model_download import fetch_model
    from headway.rollout_workers.scorers.runtimes import open_runner
    from headway.rollout_workers.scorers.serving import RequestLimits, ScorerContext, ScorerServer

    await broker.scoring.report(_loading(recipe, scorer, process), LOADING_S)
    with TemporaryDirectory(prefix="headway-scorer-") as private:
        policy = await unless_drained(fetch_model(broker, Path(private)), drain)
        if policy is None:
            await broker.scoring.leave(process)
            return
        loading = asyncio.to_thread(
            open_runner,
            scorer.kind,
            _located(scorer.path),
            recipe.scorers,
            key=scorer.key,
            policy=policy.directory,
            most_tokens=recipe.engine.max_model_len,
            roots=roots,
        )
        try:
            with lasting_config_errors():
                runner = await loading
        except BaseException:
            await broker.scoring.leave(process)
            raise
    log.info("scorer %s: %s holds %s", process, scorer.name, scorer.path)
    context = ScorerContext(
        scorer=scorer.name,
        kind=scorer.kind,
        process=process,
        device=recipe.scorers.device,
        limits=RequestLimits(*_limits(recipe, scorer)),
        batch_tokens=recipe.scorers.batch_tokens,
        hold_s=scorer.deadline_s,
        lease_ttl_s=recipe.broker.lease_ttl_s,
        heartbeat_s=recipe.workers.heartbeat_s,
        patience_s=recipe.workers.patience_s,
    )
    serving = ScorerServer(context, broker, runner)
    watch = asyncio.create_task(drain_when_asked(serving.request_drain, drain))
    try:
        log.info("scorer %s: %s", process, await serving.run())
    finally:
        watch.cancel()


def _limits(recipe: Recipe, scorer: Scorer) -> tuple[int, int, int]:
    """Return the fields of the scorer's RequestLimits."""
    candidates = recipe.algorithm.distillation.candidates if scorer.kind == "teacher" else 0
    return recipe.sampling.max_new_tokens, recipe.engine.max_model_len, candidates


def _located(path: str) -> str:
    """Return the model's path; a relative one is below the directory in which the user started `headway`."""
    here = import_directory() / path
    return str(here) if os.path.isdir(here) else path


def _loading(recipe: Recipe, scorer: Scorer, process: str) -> ScorerInfo:
    """Return the report of a scorer whose model is not there yet."""
    return ScorerInfo(
        process=process,
        scorer=scorer.name,
        kind=scorer.kind,
        host=socket.gethostname(),
        pid=os.getpid(),
        state="loading",
        device=recipe.scorers.device,
    )


def scorer_clients(broker: Broker, worker: str = "") -> "ScorerOpener":
    """Return what opens the scorers of a run's reward models for a worker, or for the learner."""

    def opened(name: str, config: RewardConfig) -> "TokenScorer":
        return _client_of(broker, worker, name, config.deadline_s)

    return opened


def local_scorers(recipe: Recipe) -> "ScorerOpener":
    """Return what opens reward models in this process, for commands that have no broker."""
    from headway.rollout_workers.scorers.runtimes import open_runner
    from headway.rollout_workers.scorers.scorer_client import InProcessScorer

    keys = {scorer.name: scorer.key for scorer in scorers_of(recipe)}

    def opened(name: str, config: RewardConfig) -> "TokenScorer":
        open_one = partial(open_runner, REWARD_MODEL, config.path, recipe.scorers, key=keys[name])
        return InProcessScorer(
            partial(open_one, most_tokens=recipe.engine.max_model_len, roots=roots_of_scorers(recipe))
        )

    return opened


def open_teacher(broker: Broker, recipe: Recipe, worker: str) -> "TeacherClient | None":
    """Return the recipe's teacher; None where it has none."""
    from headway.rollout_workers.samples.teacher_client import TEACHER, TeacherClient

    if not recipe.teacher.path:
        return None
    scorer = _client_of(broker, worker, TEACHER, recipe.teacher.deadline_s)
    return TeacherClient(
        scorer,
        temperature=recipe.sampling.temperature,
        deadline_s=recipe.teacher.deadline_s,
        top_k=recipe.algorithm.distillation.candidates,
    )


def _client_of(broker: Broker, worker: str, name: str, hold_s: float) -> "TokenScorer":
    from headway.broker.client.broker import Outages
    from headway.rollout_workers.scorers.scorer_client import ScorerClient

    return ScorerClient(broker.scoring, Outages(broker.url), name, hold_s=hold_s, worker=worker)

"""The worker role: one process with one engine. It is given only a broker URL and a run name."""

import asyncio
import gc
import importlib
import logging
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from headway.broker.client.broker import Broker, open_broker
from headway.broker.errors import (
    LASTING_EXIT,
    UNHEALTHY_EXIT,
    SchemaMismatchError,
    UnhealthyWorkerError,
    WeightSyncError,
)
from headway.broker.user_code.import_paths import ImportRoots, import_directory
from headway.deploy.launch.engine_preload import ENGINE
from headway.deploy.launch.process_pool import DRAIN_WORKER_S
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import recipe_from_bytes, with_overrides
from headway.deploy.recipe.trust import check_stored
from headway.rollout_workers.engines import libraries_of

from .config_watch import (
    Signals,
    drain_when_asked,
    drained_when_changed,
    fetch_config,
    lasting_config_errors,
    unless_drained,
)
from .prewarmed_engine import PrewarmedEngine, WorkerPart, closed_by, closing_parts, open_worker_engine, sent_rank

if TYPE_CHECKING:
    from headway.rollout_workers.config import EvalConfig
    from headway.rollout_workers.rewards import Reward
    from headway.rollout_workers.worker import Worker

PARTS_OF_GRACE = 5
"""A leaving worker's four steps and the end of its engine get a fifth each of the time that it has."""
PARTS_FOR_BROKER = 2
"""The parts of it for which a leaving worker waits, in all its steps together, for a broker that is away."""
GRACE_S = 20.0
"""Seconds for a worker that found itself unfit to hand its work back. Then its process ends."""

log = logging.getLogger(__name__)


def work(
    url: str,
    run: str,
    worker: str,
    overrides: Sequence[str],
    allowed: Sequence[str] = (),
    grace_s: float = DRAIN_WORKER_S,
    session: str = "",
) -> bool:
    """Work until the run is over, or until SIGTERM or SIGINT drains this worker within `grace_s`. Returns whether such
    a signal came. `allowed`: modules and import paths that the run's configuration may name. `session`: the secret by
    which its supervisor can hand its leases back; empty: one of its own. Raises HeadwayError."""
    signals = Signals()
    return signals.run(_run(url, run, worker, overrides, allowed, grace_s, session, signals))


async def _run(
    url: str,
    run: str,
    worker: str,
    overrides: Sequence[str],
    allowed: Sequence[str],
    grace_s: float,
    session: str,
    signals: Signals,
) -> None:
    drain = asyncio.Event()
    signals.drain(drain)
    broker = await open_broker(url, run, session=session)
    broker.end_when(drain.is_set, PARTS_FOR_BROKER * grace_s / PARTS_OF_GRACE)
    try:
        async with _private_directory(run, worker, overrides, allowed) as (private, ahead):
            stored = await unless_drained(_fetch_config(broker, ahead), drain)
            if stored is not None:
                with lasting_config_errors():
                    of_run = recipe_from_bytes(stored)
                    recipe = with_overrides(of_run, overrides)
                    roots = check_stored(recipe, overrides, allowed)
                broker.leases.storage.payload_ttl_s = recipe.broker.payload_ttl_s
                broker.leases.storage.payload_shards = recipe.broker.payload_shards
                broker.leases.storage.replicas = recipe.broker.replicas
                async with drained_when_changed(broker, stored, drain, _workers_part):
                    await _work(broker, of_run, recipe, worker, private, drain, roots, ahead, grace_s / PARTS_OF_GRACE)
    except SchemaMismatchError as error:
        await _name(broker, worker, "version", f"{error} Restarting the worker cannot mend this.")
        raise
    except WeightSyncError as error:
        await _name(broker, worker, "weights", str(error))
        if error.exit_code == LASTING_EXIT:
            raise
        raise UnhealthyWorkerError(str(error)) from error
    finally:
        await broker.close()


async def _name(broker: Broker, worker: str, rule: str, reason: str) -> None:
    """Tell others why this worker is set aside."""
    await broker.faults.report(worker=worker, host=socket.gethostname(), rule=rule, reason=reason)


def _end_soon() -> None:
    """End the process once GRACE_S have passed, whatever hangs in it then."""
    timer = threading.Timer(GRACE_S, os._exit, (UNHEALTHY_EXIT,))
    timer.daemon = True
    timer.start()


@asynccontextmanager
async def _private_directory(
    run: str, worker: str, overrides: Sequence[str], allowed: Sequence[str]
) -> AsyncIterator[tuple[Path, PrewarmedEngine]]:
    """Yield a directory of this worker's own, and what may open an engine in it ahead of the learner."""
    with TemporaryDirectory(prefix="headway-worker-") as private:
        ahead = PrewarmedEngine(run, worker, overrides, allowed, Path(private))
        try:
            yield Path(private), ahead
        finally:
            await ahead.close()


async def _fetch_config(broker: Broker, ahead: PrewarmedEngine) -> bytes:
    """Fetch the configuration. The libraries are imported meanwhile, which takes seconds, and if there is no
    configuration then, an engine is opened."""
    fetching = asyncio.create_task(fetch_config(broker))
    try:
        await asyncio.to_thread(_import_libraries)
        if not fetching.done():
            await ahead.open()
        return await fetching
    finally:
        fetching.cancel()


def _import_libraries() -> None:
    for name in ("transformers", "headway.rollout_workers.worker", *libraries_of(os.environ.get(ENGINE, ""))):
        importlib.import_module(name)


def _workers_part(stored: bytes) -> tuple[Any, ...]:
    """Return the parts of the configuration that a worker's work depends on."""
    recipe = recipe_from_bytes(stored)
    broker, parts = recipe.broker, (recipe.model, recipe.rewards, recipe.sampling, recipe.engine, recipe.workers)
    leases = broker.lease_ttl_s, broker.payload_ttl_s, broker.payload_shards, broker.replicas
    return (
        *parts,
        recipe.environment,
        recipe.agent,
        recipe.teacher,
        recipe.algorithm.distillation.candidates,
        recipe.weights,
        recipe.algorithm.router_replay,
        recipe.run.seed,
        recipe.run.placement,
        _evaluations(recipe.evaluation),
        leases,
        _under_way(recipe),
    )


def _under_way(recipe: Recipe) -> int:
    """Return how many samples the run has under way at most, which its workers share; 0 if the recipe says how many one
    engine runs."""
    if recipe.engine.max_concurrent is not None:
        return 0
    learner, ahead = recipe.learner, recipe.staleness.ahead
    steps = 1 + (recipe.staleness.max_lag if ahead is None else ahead)
    return math.ceil(steps * learner.groups_per_step) * learner.group_size


def _evaluations(config: "EvalConfig") -> tuple[Any, ...]:
    return config.where, config.samples, config.temperature, config.pass_reward, config.hold_s


async def _work(
    broker: Broker,
    of_run: Recipe,
    recipe: Recipe,
    worker: str,
    private: Path,
    drain: asyncio.Event,
    roots: ImportRoots,
    ahead: PrewarmedEngine,
    exit_step_s: float = DRAIN_WORKER_S / PARTS_OF_GRACE,
) -> None:
    from headway.deploy.observe.tracing import open_sample_traces
    from headway.rollout_workers.decoding import load_decoding
    from headway.rollout_workers.model_download import fetch_model
    from headway.rollout_workers.samples.leased_samples import WorkerContext
    from headway.rollout_workers.weight_updates.engine_turns import keep_awake
    from headway.rollout_workers.worker import Worker
    from headway.weightsync.subscriber import Subscriber

    from .player import open_player
    from .scorer import open_teacher

    fetched = await unless_drained(fetch_model(broker, private), drain)
    if fetched is None:
        return
    model = fetched.directory
    is_colocated = recipe.run.is_colocated
    if is_colocated and not await unless_drained(_may_open(broker, recipe, worker), drain):
        return
    with lasting_config_errors(), keep_awake(broker, worker) if is_colocated else nullcontext():
        rank = sent_rank(of_run, recipe, model, roots)
        engine = await ahead.taken(recipe, roots, model, rank) or open_worker_engine(recipe, model, worker, roots, rank)
    log.info("worker %s: engine %s is up", worker, recipe.engine.kind)
    gc.collect()
    gc.freeze()  # an engine's packages keep millions of objects for good, which would be examined ten times a second
    with ExitStack() as traced:
        async with closing_parts(engine) as opened:
            decoding = load_decoding(model, fetched.end_tokens, recipe.sampling.keep_special_tokens)
            context = WorkerContext(
                worker=worker,
                engine_kind=recipe.engine.kind,
                lease_ttl_s=recipe.broker.lease_ttl_s,
                decoding=decoding,
                sampling=recipe.sampling,
                config=recipe.workers,
                weights=recipe.weights,
                records_experts=recipe.algorithm.router_replay,
                is_colocated=is_colocated,
                evaluation=recipe.evaluation,
                under_way=_under_way(recipe),
                tracer=traced.enter_context(open_sample_traces(recipe.run.name, worker)),
            )
            reward = closed_by(opened, await _open_reward(broker, recipe, worker, roots))
            rollout = Worker(
                context,
                broker=broker,
                engine=engine,
                subscriber=closed_by(opened, Subscriber(broker, worker, recipe.weights, roots, _model_here(recipe))),
                player=closed_by(opened, await open_player(recipe, reward, decoding, model, roots)),
                teacher=closed_by(opened, open_teacher(broker, recipe, worker)),
                on_unhealthy=_end_soon,
                exit_step_s=exit_step_s,
            )
            await _roll_out(rollout, recipe, worker, drain, opened)


async def _open_reward(broker: Broker, recipe: Recipe, worker: str, roots: ImportRoots) -> "Reward":
    """Open the rewards. Packages that they need are imported while the first samples are generated."""
    from headway.rollout_workers.rewards import ZeroReward, open_reward

    from .scorer import scorer_clients

    if not recipe.rewards:
        return ZeroReward()
    return await open_reward(recipe.rewards, roots, scorer_clients(broker, worker), warms=True)


def _model_here(recipe: Recipe) -> Path | None:
    """Return the directory of the recipe's model, if there is one on this machine, the worker may read it, and the
    learner publishes what it holds: not so a quantized base. A relative path is below the directory in which the user
    started `headway`."""
    model, here = recipe.model, import_directory() / recipe.model.path
    is_as_published = model.adapter is None or model.adapter.quantize_base == "none"
    return here if recipe.weights.pull_files and model.path and is_as_published and os.path.isdir(here) else None


async def _roll_out(
    rollout: "Worker", recipe: Recipe, worker: str, drain: asyncio.Event, opened: list[WorkerPart]
) -> None:
    """Run the worker to its end. It closes its parts itself once it runs, and leaves nothing to `opened`."""
    from headway.deploy.observe.prometheus.worker_metrics import serve_worker_metrics

    watch = asyncio.create_task(drain_when_asked(rollout.request_drain, drain))
    try:
        with serve_worker_metrics(rollout, recipe.workers) as endpoint:
            if endpoint is not None:
                log.info("metrics for Prometheus: %s", endpoint.url)
            opened.clear()
            log.info("worker %s: %s", worker, await rollout.run())
    finally:
        watch.cancel()


async def _may_open(broker: Broker, recipe: Recipe, worker: str) -> bool:
    """Wait until the learner leaves the device to engines. Returns False if the run is over."""
    from headway.broker.client.broker import Outages
    from headway.rollout_workers.health import RunEnd
    from headway.rollout_workers.weight_updates.engine_turns import wait_for_device

    run_end = RunEnd(recipe.workers.patience_s)

    async def is_over() -> bool:
        return run_end.is_over(await broker.status.state())

    return await wait_for_device(broker.phases, worker, Outages(broker.url), is_over)

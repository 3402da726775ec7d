"""The learner role: wires backend, broker, weight sync and evaluation together and runs the loop to its end."""

import gc
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from headway.broker import BlockingBroker
from headway.broker.client.supervision import LearnerInfo
from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt, RunRules, SampleLimits, WeightVersion
from headway.broker.schema.status import RunStatus
from headway.broker.schema.weights import ModelFiles
from headway.deploy.launch.base import DRAIN_NOTICE
from headway.deploy.observe.run_warnings import log_warnings
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.observe.sinks.base import SinkRun
from headway.deploy.observe.sinks.trackers import points
from headway.deploy.observe.tracing import open_step_traces
from headway.deploy.recipe.adapter_support import adapted_by, adapter_rank, why_merged
from headway.deploy.recipe.pools import pools_of, scorers_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import recipe_to_bytes
from headway.deploy.recipe.trust import roots_of
from headway.deploy.run.events import EvaluationEvent
from headway.deploy.run.record import plot, summarize
from headway.deploy.run.run_directory import (
    CHECKPOINTS,
    EXPERIENCE,
    identity_of,
    last_incarnation,
    write_identity,
    write_incarnation,
)
from headway.learner.backends.base import Backend
from headway.learner.checkpoint import Best, CheckpointStore, read_best
from headway.learner.data.prompts import open_prompts
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience.log import ExperienceLog, Rewind
from headway.learner.experience.stream import Experience
from headway.learner.models.model_files import model_files
from headway.learner.models.pretrained import load_config, load_tokenizer
from headway.learner.objective.composition import needs_critic, needs_reference, needs_teacher
from headway.learner.objective.logprob_agreement import EXACT, EXPLAINED, QUANTIZED
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import UpdateConfig, Updater
from headway.learner.ranks import Ranks
from headway.learner.stages.device_lock import DeviceLock, wait_for_device
from headway.learner.stages.distill import as_teacher
from headway.learner.stages.loop import TOLERANCE, Learner, LoopConfig, RlStage
from headway.learner.stages.starting_point import Origin, RunClaim, Start, choose_origin, claim_run, identify, open_log
from headway.rollout_workers.decoding import check_kept
from headway.weightsync.publisher import Publisher
from headway.weightsync.transports.addresses import allow_many_files

from .held_out_evaluation import Evaluator, WorkerEvaluations
from .observer import RunObserver
from .recipe_backends import recipe_backend, recipe_cost, recipe_critic, recipe_routing
from .stop_request import StopRequest

log = logging.getLogger(__name__)

PROBE_TOKENS = 32
ROUNDED_BY = ("quantization", "kv_cache_dtype")
"""The options of vLLM and SGLang by which an engine holds weights or its cache in fewer bits."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that every rank opens before rank 0 connects to the broker."""

    recipe: Recipe
    backend: Backend
    ranks: Ranks
    updater: Updater
    checkpoints: CheckpointStore
    best: Best | None
    origin: Origin
    cursor: PromptCursor
    held_out: Sequence[Prompt]
    probe_tokens: Sequence[int]
    files: ModelFiles
    should_stop: StopRequest = field(default_factory=lambda: StopRequest(DRAIN_NOTICE))


def train(recipe: Recipe, url: str, *, resume: bool, rewind: Rewind | None = None) -> bool:
    """Train the recipe's run on the server at `url`. Every rank calls it.

    Returns True at the run's end, and False where the learner was asked to stop and has written a checkpoint.
    """
    if recipe.run.is_colocated:
        wait_for_device(url, recipe.run.name)
    parts = _build(recipe, resume, rewind)
    with ExitStack() as stack:
        joined = stack.enter_context(_joined(parts, url)) if parts.ranks.is_first else None
        experience = joined.experience if joined else None
        start = joined.start if joined else Start(WeightVersion(0, 0), "", 0)
        start = msgspec.msgpack.decode(parts.ranks.share_bytes(msgspec.msgpack.encode(start)), type=Start)
        observer = _observer(parts, joined, start, stack)
        learner = _learner(parts, joined, start, observer)
        if experience is not None:
            experience.set_state("training")
        gc.collect()
        gc.freeze()  # objects that packages keep for good: examining them all takes a good part of a step
        is_finished = RlStage(learner).run()
        if experience is not None:
            status = experience.status()  # now, while the workers are there to be counted
            if status is not None:
                observer.on_end(status)
            experience.set_state("finished" if is_finished else "stopped")
            _conclude(recipe, status)
            if parts.best is not None:
                for path in parts.checkpoints.retired():  # those that were kept until their evaluations were over
                    shutil.rmtree(path, ignore_errors=True)
    return is_finished


def _build(recipe: Recipe, resume: bool, rewind: Rewind | None) -> Parts:
    seed_generators(recipe.run.seed)
    tokenizer = load_tokenizer(recipe.model)
    check_kept(tokenizer, recipe.sampling.keep_special_tokens)  # on whatever machine the model lies
    prompts = open_prompts(recipe.prompts, tokenizer, recipe.run.seed)
    max_prompt_tokens = recipe.most_prompt_tokens
    prompts.check(max_prompt_tokens)  # before the model is loaded, which takes minutes
    held_out = prompts.held_out(recipe.evaluation.prompts, max_prompt_tokens)
    backend = recipe_backend(recipe)
    ranks = Ranks.of(backend)
    best = _best(recipe)
    checkpoints = CheckpointStore(recipe.run_directory / CHECKPOINTS, recipe.checkpoint.keep, best)
    updater = recipe_updater(recipe, backend, ranks)
    origin = choose_origin(checkpoints, lambda path: _load(backend, updater, path), ranks, resume=resume, rewind=rewind)
    probe = prompts.train(0, 0, group="probe", num_samples=1).token_ids
    return Parts(
        recipe=recipe,
        backend=backend,
        ranks=ranks,
        updater=updater,
        checkpoints=checkpoints,
        best=best,
        origin=origin,
        cursor=PromptCursor(
            prompts,
            num_samples=recipe.learner.group_size,
            seed=recipe.run.seed,
            shuffle=recipe.prompts.shuffle,
            epochs=recipe.prompts.epochs,
            max_prompt_tokens=max_prompt_tokens,
            state=origin.state.cursor if origin.state else None,
        ),
        held_out=held_out,
        probe_tokens=[*probe, *probe][:PROBE_TOKENS],  # twice, because a prompt of one token predicts none
        files=replace(model_files(recipe.model), limits=_limits(recipe)),
    )


def _best(recipe: Recipe) -> Best | None:
    """Return what chooses the best checkpoint, where the recipe says what is best."""
    config = recipe.checkpoint.best
    return Best(recipe.run_directory / CHECKPOINTS, config.metric, config.mode) if config is not None else None


def _limits(recipe: Recipe) -> SampleLimits:
    """Return the limits of a sample of this run."""
    routing = recipe_routing(recipe)
    vocabulary = getattr(load_config(recipe.model).get_text_config(), "vocab_size", None)
    candidates = recipe.algorithm.distillation.candidates
    if vocabulary is not None and candidates > vocabulary:
        raise ConfigError(
            f"algorithm.distillation.top_k is {candidates}, and the model has {vocabulary} tokens; set it to at most"
            " that, where the divergence is exact."
        )
    return SampleLimits(
        vocabulary=vocabulary,
        max_new_tokens=recipe.sampling.max_new_tokens,
        experts=(routing.layers, routing.per_token, routing.experts) if routing else None,
        has_teacher=needs_teacher(recipe.algorithm),
        candidates=candidates,
    )


def _load(backend: Backend, updater: Updater, checkpoint: Path) -> None:
    backend.load(checkpoint)
    updater.load(checkpoint)


def seed_generators(seed: int) -> None:
    """Seed the process's own generators, from which a user's loss may draw. Checkpoints hold their states."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class JoinedRun:
    """What rank 0 has of the run that it claimed."""

    experience: Experience
    blocking: BlockingBroker
    start: Start


@contextmanager
def _joined(parts: Parts, url: str) -> Iterator[JoinedRun]:
    """Connect rank 0 to the run and claim it, with the model's files in the broker for workers to start from."""
    recipe = parts.recipe
    with ExitStack() as stack:
        blocking = BlockingBroker(url, recipe.run.name)
        stack.callback(blocking.close)
        blocking.broker.end_when(parts.should_stop)
        claimed, experience_log = _claim(parts, blocking)
        owner = claimed.claim.owner
        blocking.call(blocking.broker.heartbeat.begin(LearnerInfo.this_process()))
        blocking.broker.garbage.storage.payload_ttl_s = recipe.broker.payload_ttl_s
        blocking.call(blocking.broker.garbage.begin(owner))
        blocking.call(blocking.broker.versions.put_model(owner, parts.files))
        allow_many_files()
        publisher = Publisher(blocking, owner, recipe.weights, roots_of(recipe))
        stack.callback(publisher.close)
        experience = Experience(
            blocking,
            claimed.claim,
            publisher,
            parts.cursor,
            experience_log,
            groups_per_step=recipe.learner.groups_per_step,
            max_lag=recipe.staleness.max_lag,
            should_stop=parts.should_stop,
            replacement_rounds=recipe.algorithm.dynamic_sampling,
            masks_truncated=recipe.algorithm.mask_truncated,
        )
        if claimed.replayed:
            experience.replay(claimed.replayed)
        yield JoinedRun(experience=experience, blocking=blocking, start=claimed.start)


def _claim(parts: Parts, blocking: BlockingBroker) -> tuple[RunClaim, ExperienceLog]:
    """Claim the run, and note that in its directory before any weights are published."""
    recipe, origin, directory = parts.recipe, parts.origin, parts.recipe.run_directory
    identity = identify(blocking, origin, directory, identity_of(directory))
    write_identity(directory, identity)
    experience_log = open_log(origin, parts.checkpoints, directory / EXPERIENCE, recipe.checkpoint.log_bytes, identity)
    claimed = claim_run(
        blocking,
        origin,
        experience_log,
        parts.cursor,
        identity=identity,
        last_incarnation=last_incarnation(directory),
        rules=rules_of(recipe),
        config=recipe_to_bytes(recipe),
    )
    blocking.broker.batches.limits = parts.files.limits
    write_incarnation(directory, claimed.claim.owner.incarnation)
    return claimed, experience_log


def _observer(parts: Parts, joined: JoinedRun | None, start: Start, stack: ExitStack) -> RunObserver:
    recipe = parts.recipe
    sinks = evaluator = by_workers = traces = None
    if joined is not None:
        run = SinkRun(name=recipe.run.name, identity=start.identity, directory=recipe.run_directory)
        sinks = stack.enter_context(open_sinks(recipe.metrics, run))
        traces = stack.enter_context(open_step_traces(recipe.run.name, start.identity))
        if parts.held_out and recipe.evaluation.where == "workers":
            by_workers = WorkerEvaluations(recipe, joined.experience, parts.held_out)
            if parts.best is not None:
                parts.best.awaited = by_workers.awaited
        elif recipe.evaluation.prompts:
            url = joined.blocking.broker.url
            evaluator = stack.enter_context(Evaluator(recipe, parts.files, parts.held_out, url=url))
    observer = RunObserver(
        recipe,
        first_step=start.version.step,
        sinks=sinks,
        experience=joined.experience if joined else None,
        evaluator=evaluator,
        traces=traces,
        by_workers=by_workers,
        on_evaluated=_chosen_by(parts),
        should_stop=parts.should_stop,
    )
    if joined is not None:
        stack.enter_context(log_warnings(joined.blocking, observer.on_look))
    return observer


def _learner(parts: Parts, joined: JoinedRun | None, start: Start, observer: RunObserver) -> Learner:
    recipe, experience = parts.recipe, joined.experience if joined else None
    phases = joined.blocking.broker.phases if joined else None
    return Learner(
        backend=parts.backend,
        ranks=parts.ranks,
        updater=parts.updater,
        experience=experience,
        cursor=parts.cursor,
        checkpoints=parts.checkpoints,
        config=LoopConfig(
            steps=recipe.learner.steps,
            checkpoint_every=recipe.checkpoint.every_steps,
            asynchronous=recipe.checkpoint.asynchronous,
            probe_tokens=tuple(parts.probe_tokens),
            probe_tolerance=max(TOLERANCE[recipe.engine.dtype], TOLERANCE[recipe.model.dtype]),
            identity=start.identity,
            caught_up_at=start.caught_up_at,
            is_branch=start.is_branch,
            sends_adapter=_sends_adapter(recipe),
        ),
        observer=observer,
        should_stop=parts.should_stop,
        version=start.version,
        device_lock=DeviceLock(phases, parts.updater.models, parts.ranks, experience)
        if recipe.run.is_colocated
        else None,
    )


def _sends_adapter(recipe: Recipe) -> bool:
    config = load_config(recipe.model)
    is_alone = adapter_rank(recipe, config) > 0
    if recipe.model.adapter is not None and not is_alone:
        reason = why_merged(recipe, adapted_by(recipe, config))
        log.info("versions carry whole weights, with the adapter merged into them: %s", reason)
    return is_alone


def _chosen_by(parts: Parts) -> Callable[[EvaluationEvent], None] | None:
    """Return what chooses the best checkpoint after each evaluation."""
    best = parts.best
    if best is None:
        return None

    def choose(event: EvaluationEvent) -> None:
        best.note(event.step, dict(points(event)))
        parts.checkpoints.choose_best()

    return choose


def recipe_updater(recipe: Recipe, backend: Backend, ranks: Ranks) -> Updater:
    """Return what turns batches into updates of `backend`, as the recipe wants it. Collective over the ranks."""
    objective = Objective(recipe.algorithm, max_new_tokens=recipe.sampling.max_new_tokens)
    if recipe.algorithm.distillation.candidates:
        as_teacher(backend)
    return Updater(
        backend,
        ranks,
        objective,
        recipe_backend(recipe) if needs_reference(recipe.algorithm) else None,
        recipe_critic(recipe, ranks) if needs_critic(recipe.algorithm) else None,
        config=UpdateConfig(
            algorithm=recipe.algorithm,
            learner=recipe.learner,
            optimizer=recipe.optimizer,
            temperature=recipe.sampling.temperature,
            max_new_tokens=recipe.sampling.max_new_tokens,
            max_lag=recipe.staleness.max_lag,
            cost=recipe_cost(recipe),
            routing=recipe_routing(recipe),
            agreement_bound=agreement_bound(recipe),
            is_cut=recipe.sampling.top_p < 1 or recipe.sampling.top_k > 0,
        ),
    )


def agreement_bound(recipe: Recipe) -> float:
    """Return the bound of `LogprobAgreement`: the recipe's own, or what the rounding of its engines and of the learner
    explains at its temperature."""
    if recipe.learner.agreement_bound is not None:
        return recipe.learner.agreement_bound
    engines = [recipe.engine, *(pool.recipe.engine for pool in pools_of(recipe))]
    formats = {recipe.model.dtype, *(engine.dtype for engine in engines)}
    is_exact = formats == {"float32"} and recipe.learner.device == "cpu"
    rounding = EXACT if is_exact else max(EXPLAINED[one] for one in formats)
    if any(engine.options.get(key) not in (None, "auto") for engine in engines for key in ROUNDED_BY):
        rounding = max(rounding, QUANTIZED)
    return rounding / min(1.0, recipe.sampling.temperature)


def rules_of(recipe: Recipe) -> RunRules:
    """Return what the broker must know of the recipe. Each rule but `scorers` is the setting of the same name."""
    settings: dict[str, Any] = {"scorers": " ".join(scorer.name for scorer in scorers_of(recipe))}
    for section in (recipe.learner, recipe.staleness, recipe.broker, recipe.workers):
        settings |= msgspec.structs.asdict(section)
    return RunRules(**{name: settings[name] for name in RunRules.__struct_fields__})


def _conclude(recipe: Recipe, status: RunStatus | None) -> None:
    """Write summary.json and the plot."""
    extras: dict[str, float] = {"max_lag_allowed": recipe.staleness.max_lag}
    if recipe.checkpoint.best is not None and (best := read_best(recipe.run_directory / CHECKPOINTS)) is not None:
        extras |= {"best_step": best.step, "best_value": best.value}
    if status is not None:
        queues = status.queues
        extras |= {
            "dropped_stale": queues.dropped_stale,
            "requeued_stale": queues.requeued_stale,
            "expired_leases": queues.expired_leases,
            "refused_submissions": queues.fenced,
            "rejected_payloads": queues.rejected,
            "generated_tokens": queues.generated_tokens,
            "wasted_tokens": queues.wasted_tokens,
            "resumed_tokens": queues.resumed_tokens,
            "discarded_tokens": queues.discarded_tokens,
            "trimmed_samples": queues.trimmed_samples,
            "uninformative": queues.uninformative,
            "skipped_evaluations": queues.skipped_evaluations,
            "worker_restarts": queues.worker_restarts,
        }
    summarize(recipe.run_directory, extras)
    plot(recipe.run_directory, recipe.staleness.max_lag)

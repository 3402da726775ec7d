"""A large run that is not trained: a directory with as many steps as wanted, and a server with as many workers."""

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headway.broker.client.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark
from headway.broker.schema import Group, Prompt, RunRules, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.schema.metrics import LagFigures, StepMetrics
from headway.broker.schema.status import WorkerInfo
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.run.directory import CHECKPOINTS, EXPERIENCE, held
from headway.deploy.run.report import METRICS, TRAINED
from headway.learner.experience.logged_batch import write_batch
from headway.learner.experience.segments import LogSegment

RUN = "large"
GROUPS, SAMPLES = 64, 8
RESPONSE_TOKENS = 2000
WORDS = 50_000
STEP_S = 2.0
"""Seconds between two steps of the run while it is watched."""
AHEAD, LATER_BATCHES = "ahead", 30
"""The batches of these steps are written before, so that writing them takes no processor time from the measurement."""
ALIVE_S = 120.0
BEAT_S = 2.0
"""Seconds between two heartbeats of a worker; a real one sends one each second."""
KEPT_STEPS = 512


def write_files(directory: Path, steps: int) -> Path:
    """Write the files of a run whose reward grows and whose lag changes."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_recipe(load_recipe("arithmetic.yaml", (f"run.name={RUN}",))))
    (directory / METRICS).write_bytes(
        b"".join(msgspec.json.encode(sample_step(step, steps)) + b"\n" for step in range(steps))
    )
    with (directory / TRAINED).open("w") as file:
        for step in range(steps):
            tids = [
                f"0000-{step * GROUPS + group:08d}:0:{sample}" for group in range(GROUPS) for sample in range(SAMPLES)
            ]
            line = {"identity": "", "incarnation": 1, "step": step, "tids": tids, "oldest_step": max(0, step - 4)}
            file.write(msgspec.json.encode(line).decode() + "\n")
    _write_tokenizer(directory / CHECKPOINTS / "1" / f"step_{steps - 1}")
    for step in (steps - 200, steps - 1):
        _log_batch(directory / EXPERIENCE, step)
    for step in range(steps, steps + LATER_BATCHES):
        _log_batch(directory / AHEAD, step)
    return directory


@contextmanager
def training(directory: Path, steps: int) -> Iterator[None]:
    """Hold the directory as a run does, and let the run take a step every STEP_S, until the end of the block."""
    over = threading.Event()
    with held(directory):
        thread = threading.Thread(target=_train, args=(directory, steps, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _train(directory: Path, steps: int, over: threading.Event) -> None:
    step = steps
    while not over.wait(STEP_S):
        with suppress(FileNotFoundError):
            (directory / AHEAD / f"steps_{step}.log").rename(directory / EXPERIENCE / f"steps_{step}.log")
        with (directory / METRICS).open("ab") as file:
            file.write(msgspec.json.encode(sample_step(step, steps)) + b"\n")
        step += 1


def _write_tokenizer(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True)
    words = {f"word{number}": number for number in range(WORDS)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(checkpoint / "tokenizer.json"))


def _log_batch(log: Path, step: int) -> None:
    log.mkdir(exist_ok=True)
    write = partial(write_batch, identity="", step=step, groups=_batch(step))
    LogSegment(log / f"steps_{step}.log").append(step, write)


def _batch(step: int) -> list[Group]:
    return [
        Group(
            prompt=(prompt := _prompt(step * GROUPS + group)),
            round=0,
            trajectories=tuple(_sample(prompt, sample, step) for sample in range(SAMPLES)),
        )
        for group in range(GROUPS)
    ]


def _sample(prompt: Prompt, sample: int, step: int) -> Trajectory:
    """Return a response of three weight versions."""
    tokens, third = _tokens(sample), RESPONSE_TOKENS // 3
    bounds = ((0, third, 2), (third, 2 * third, 1), (2 * third, RESPONSE_TOKENS, 0))
    return Trajectory(
        tid=TrajectoryId(prompt.group, 0, sample),
        prompt_tokens=np.array(prompt.token_ids, np.int32),
        response_tokens=tokens,
        behavior_logprobs=np.full(RESPONSE_TOKENS, -1.0, np.float32),
        loss_mask=np.ones(RESPONSE_TOKENS, np.uint8),
        spans=tuple(VersionSpan(start, end, WeightVersion(1, step - lag)) for start, end, lag in bounds),
        reward=float(sample % 2),
        rewards={},
        finish_reason="length",
        worker="w",
    )


@functools.cache
def _tokens(sample: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.random.default_rng(sample).integers(0, WORDS, RESPONSE_TOKENS, np.int32)


@contextmanager
def served(directory: Path, workers: int, steps: int) -> Iterator[tuple[EmbeddedServer, str]]:
    """Yield a server and the run's URL there; its workers send heartbeats again and again."""
    with EmbeddedServer(directory) as server:
        broker = BlockingBroker(server.url, RUN)
        broker.call(begin(broker, steps))
        over = threading.Event()
        thread = threading.Thread(target=_beat, args=(broker, workers, steps, over), daemon=True)
        thread.start()
        try:
            yield server, server.url
        finally:
            over.set()
            thread.join()
            broker.close()


async def begin(broker: BlockingBroker, steps: int) -> None:
    status, prompts = broker.broker.status, broker.broker.prompts
    rules = RunRules(max_lag=4, groups_per_step=GROUPS)
    claim = await broker.broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)
    await status.set_state(claim.owner, "training")
    await prompts.feed([_prompt(index) for index in range(6 * GROUPS)], claim.owner)
    for step in range(max(0, steps - KEPT_STEPS), steps):
        await status.report_step(claim.owner, sample_step(step, steps))


def _beat(broker: BlockingBroker, workers: int, steps: int, over: threading.Event) -> None:
    beats = 0
    while not over.is_set():
        beats += 1
        for index in range(workers):
            broker.call(broker.broker.status.heartbeat(sample_worker(index, steps, beats), ALIVE_S))
            over.wait(BEAT_S / workers)
            if over.is_set():
                return


def sample_worker(index: int, steps: int, beats: int) -> WorkerInfo:
    """Return a busy worker's report after so many others."""
    return WorkerInfo(
        worker=f"node-{index // 8:03d}-worker-{index % 8}-{index:04x}",
        host=f"node-{index // 8:03d}",
        pid=1000 + index,
        engine="vllm",
        state="generating",
        version=WeightVersion(1, steps - index % 4),
        broadcast_epoch=2,
        wants_broadcast=True,
        capacity=64,
        active=40 + (index + beats) % 24,
        generated_tokens=1000 * beats,
        submitted=10 * beats,
        tokens_per_s=2000.0 + 100 * ((index * 7 + beats) % 10),
        swaps=beats,
    )


def _prompt(index: int) -> Prompt:
    return Prompt(
        group=f"0000-{index:08d}",
        token_ids=[1, 2, 3],
        text="1+1=",
        ground_truth="2",
        data_source="arithmetic",
        extra_info={},
        num_samples=SAMPLES,
    )


def sample_step(step: int, steps: int) -> StepMetrics:
    """Return a step of 20 seconds."""
    wave = math.sin(step / 50) / 10
    lags = {lag: 100 + (step * (lag + 3)) % 17 for lag in range(5)}
    return StepMetrics(
        incarnation=1,
        step=step,
        total_steps=2 * steps,
        time_s=20.0 * (step + 1),
        reward_mean=1 - math.exp(-step / steps) + wave / 2,
        reward_std=0.2,
        response_tokens_mean=500 + 100 * wave,
        lag_mean=2 + wave,
        lag_max=4,
        lag_histogram=lags,
        token_lag_histogram={lag: 500 * count for lag, count in lags.items()},
        by_lag={
            lag: LagFigures(
                trajectories=count,
                tokens=500 * count,
                reward_mean=0.5 + wave,
                ratio_mean=1 + wave / 100,
                ess=0.9 + wave / 10,
                clip_fraction=0.1,
                mask_fraction=0.01,
            )
            for lag, count in lags.items()
        },
        groups=GROUPS,
        trajectories=GROUPS * SAMPLES,
        mixed_version_trajectories=40,
        trained_tokens=250_000 + step % 1000,
        packed_tokens=300_000,
        micro_batches=8,
        loss=0.01 * wave,
        grad_norm=0.5 + wave,
        learning_rate=1e-6,
        algorithm={"ess": 0.9 + wave / 10, "clip_fraction": 0.1},
        take_s=4.0 + wave,
        train_s=15.0,
        publish_s=0.7,
        checkpoint_s=0.3,
        step_s=20.0 + wave,
    )

"""A large run that is not trained: a directory with as many steps as wanted, and a server with as many workers."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from broker.client.batches import CheckpointMark
from broker.client.broker import BlockingBroker
from broker.schema import Prompt, RunRules, StepMetrics, WeightVersion, WorkerInfo
from broker.server.embedded import EmbeddedServer
from deploy.recipe.loading import dump_recipe, load_recipe
from deploy.run.report import METRICS, TRAINED

RUN = "large"
GROUPS, SAMPLES = 64, 8
ALIVE_S = 120.0
BEAT_S = 2.0
"""Every worker is heard of this often; a real one says something each second."""
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
    return directory


@contextmanager
def served(directory: Path, workers: int, steps: int) -> Iterator[tuple[EmbeddedServer, str]]:
    """Yield a server and the run's URL there, whose workers are heard of again and again."""
    with EmbeddedServer(directory) as server:
        broker = BlockingBroker(server.url, RUN)
        broker.call(_begin(broker, steps))
        over = threading.Event()
        thread = threading.Thread(target=_beat, args=(broker, workers, steps, over), daemon=True)
        thread.start()
        try:
            yield server, server.url
        finally:
            over.set()
            thread.join()
            broker.close()


async def _begin(broker: BlockingBroker, steps: int) -> None:
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
    """A busy worker's report after so many others."""
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
    """A step of 20 seconds."""
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

"""The commands about trained models print this around the roles' own work."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.deploy.printing import say, say_json

if TYPE_CHECKING:
    from headway.deploy.roles.export import Dtype

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
REPORT_S = 10.0
"""Seconds between two lines about a batch inference that goes on."""


def write_export(
    model: str,
    step: int | str | None,
    directory: Path,
    *,
    dtype: "Dtype | None",
    is_checked: bool,
    is_forced: bool,
    device: str,
    is_adapter: bool,
    as_json: bool,
) -> None:
    """Export the model that is meant (`find_trained`), and print what was written."""
    from transformers.utils.logging import disable_progress_bar

    from headway.deploy.roles.export import export_model
    from headway.deploy.roles.trained_model import find_trained

    disable_progress_bar()
    found = find_trained(model, step)
    done = export_model(
        found,
        directory,
        dtype=dtype,
        is_checked=is_checked,
        is_forced=is_forced,
        device=device,
        is_adapter=is_adapter,
    )
    if as_json:
        say_json(done)
        return
    size = f"{done.parameters:,} parameters in {done.dtype}, {done.bytes / 1e6:,.1f} MB"
    what = "adapter" if is_adapter else "model"
    say(f"{done.directory} holds the {what} of {done.checkpoint}: {size}.")
    if done.quantized != "none":
        say(
            f"It was trained beside a base in {done.quantized}: "
            + ("load the base in that format for it." if is_adapter else "its weights are those, made dense again.")
        )
    if (check := done.check) is not None:
        say(
            f"The {check.compared} of {check.tokens} tokens differ from those of the backend {check.backend} by"
            f" {check.mean_difference:.2g} on average, and by {check.largest_difference:.2g} at most."
        )


def answer_prompts(
    model: str,
    step: int | str | None,
    prompts: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    samples: int,
    temperature: float | None,
    seed: int,
    shard: tuple[int, int],
    workers: int | None,
    broker: str | None,
    run: str | None,
    as_json: bool,
) -> int:
    """Let the model that is meant (`find_trained`) answer the prompts, print what was done, and return the exit code.
    `workers`: processes on this machine; None: an engine in this one."""
    from transformers.utils.logging import disable_progress_bar

    from headway.deploy.roles.batch_inference import BatchInference, EngineSampler, Generated, ResponseSampler, Shard
    from headway.deploy.roles.trained_model import GenerationSettings, PoolSettings, find_trained, settings_of

    disable_progress_bar()
    found = find_trained(model, step)
    settings = settings_of(found, overrides, temperature, GenerationSettings if workers is None else PoolSettings)

    def generated(sampler: ResponseSampler) -> Generated:
        return BatchInference(
            model=found,
            prompts=prompts,
            out=out,
            settings=settings,
            sampler=sampler,
            samples=samples,
            seed=seed,
            shard=Shard(number=shard[0], count=shard[1]),
            report=_now_and_then(),
        ).run()

    if isinstance(settings, PoolSettings) and workers is not None:
        from headway.deploy.roles.batch_inference_workers import (
            GenerationPool,
            WorkerSampler,
            generation_recipe,
            run_name,
        )

        recipe = generation_recipe(found, settings, run=run or run_name(out), samples=samples, seed=seed)
        logs = out.with_name(f"{out.name}.logs")
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        pool = GenerationPool(recipe=recipe, count=workers, url=broker, logs=logs, devices=devices)
        done = pool.run(lambda url: generated(WorkerSampler(url=url, recipe=recipe)))
    else:
        done = generated(EngineSampler(model=found, settings=settings, seed=seed))
    if done is None:
        say(f"Stopped. What is done is in {out}; the same command goes on.", to_stderr=True)
        return INTERRUPTED
    if as_json:
        say_json(done)
        return 0
    before = f" {done.found} of them were there before." if done.found else ""
    say(
        f"{done.out} holds the answers of {done.model} to {done.prompts} prompts.{before} {done.responses} responses"
        f" with {done.response_tokens:,} tokens were generated."
    )
    return 0


def _now_and_then() -> Callable[[int, int], None]:
    """Return a function that says on stderr how many prompts are done, but not after every one."""
    said_s = time.monotonic()

    def report(done: int, wanted: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= REPORT_S:
            said_s = time.monotonic()
            say(f"{done} of {wanted} prompts are done", to_stderr=True)

    return report

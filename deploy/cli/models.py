"""What the commands about trained models print around the roles' own work."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.printing import say, say_json

if TYPE_CHECKING:
    from deploy.roles.export import Dtype

REPORT_S = 10.0
"""Seconds between two lines about a batch inference that goes on."""


def export(
    model: str,
    step: int | str | None,
    directory: Path,
    *,
    dtype: "Dtype | None",
    is_checked: bool,
    is_forced: bool,
    device: str,
    as_json: bool,
) -> None:
    """Export the model that is meant (`find_trained`), and print what was written."""
    from transformers.utils.logging import disable_progress_bar

    from deploy.roles.export import export_model
    from deploy.run.trained import find_trained

    disable_progress_bar()
    found = find_trained(model, step)
    done = export_model(found, directory, dtype=dtype, is_checked=is_checked, is_forced=is_forced, device=device)
    if as_json:
        say_json(done)
        return
    size = f"{done.parameters:,} parameters in {done.dtype}, {done.bytes / 1e6:,.1f} MB"
    say(f"{done.directory} holds the model of {done.checkpoint}: {size}.")
    if (check := done.check) is not None:
        say(
            f"The {check.compared} of {check.tokens} tokens differ from those of the backend {check.backend} by"
            f" {check.mean_difference:.2g} on average, and by {check.largest_difference:.2g} at most."
        )


def generate(
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
    as_json: bool,
) -> None:
    """Let the model that is meant (`find_trained`) answer the prompts, and print what was done."""
    from transformers.utils.logging import disable_progress_bar

    from deploy.roles.engine import own_settings
    from deploy.roles.generating import BatchInference, Shard
    from deploy.run.trained import find_trained

    disable_progress_bar()
    found = find_trained(model, step)
    done = BatchInference(
        model=found,
        prompts=prompts,
        out=out,
        settings=own_settings(found, overrides, temperature),
        samples=samples,
        seed=seed,
        shard=Shard(number=shard[0], count=shard[1]),
        report=_now_and_then(),
    ).run()
    if as_json:
        say_json(done)
        return
    before = f" {done.found} of them were there before." if done.found else ""
    say(
        f"{done.out} holds the answers of {done.model} to {done.prompts} prompts.{before} {done.responses} responses"
        f" with {done.response_tokens:,} tokens were generated."
    )


def _now_and_then() -> Callable[[int, int], None]:
    """Return a function that says on stderr how many prompts are done, but not after every one."""
    said_s = time.monotonic()

    def report(done: int, wanted: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= REPORT_S:
            said_s = time.monotonic()
            say(f"{done} of {wanted} prompts are done", to_stderr=True)

    return report

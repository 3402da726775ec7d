"""What the commands about trained models print around the roles' own work."""

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.printing import say, say_json

if TYPE_CHECKING:
    from deploy.roles.export import Dtype


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
            f"The logprobs of {check.tokens} tokens differ from those of the backend {check.backend} by"
            f" {check.mean_difference:.2g} on average, and by {check.largest_difference:.2g} at most."
        )

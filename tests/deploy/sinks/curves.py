# mypy: disable-error-code="import-not-found"
"""Event files, as TensorBoard itself reads them."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Figures = dict[int, float]
"""A curve's values, by step."""


def curves(directory: Path) -> "EventAccumulator":
    """Read everything that TensorBoard would show of `directory`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return found


def curve(directory: Path, tag: str) -> Figures:
    """Return one curve of the directory."""
    return {point.step: point.value for point in curves(directory).Scalars(tag)}


def every_curve(directory: Path) -> dict[str, Figures]:
    """Return all curves of the directory, by tag."""
    found = curves(directory)
    return {tag: {point.step: point.value for point in found.Scalars(tag)} for tag in found.Tags()["scalars"]}

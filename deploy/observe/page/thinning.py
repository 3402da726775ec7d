"""Thins long series to as many points as a screen shows, without losing what sticks out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec

from headway.broker.schema.metrics import StepMetrics
from headway.deploy.run.figures import lag_histogram

POINTS = 400
"""Most points of a curve."""
COLUMNS = 120
"""Most columns of bars and of a heat map."""
ROWS = 32
"""Most rows of a heat map."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A value over steps; each point stands for one or several steps."""

    mean: list[float | None]
    low: list[float | None] = []
    """The smallest value behind each point; empty where each point stands for one step."""
    high: list[float | None] = []


class LagMap(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories trained, by lag and by step."""

    first: list[int]
    """[columns] The first step of each column."""
    last: list[int]
    rows: list[tuple[int, int]]
    """The smallest and the largest lag of each row."""
    trajectories: list[list[int]]
    """[columns, rows]"""
    totals: list[int]
    """[rows] Over all steps."""


def spans(count: int, most: int) -> list[slice]:
    """Cut `count` things into at most `most` runs of almost equal length."""
    number = min(count, most)
    return [slice(count * index // number, count * (index + 1) // number) for index in range(number)]


def curve(values: Sequence[float | None]) -> Curve:
    """Thin a series; a point whose values are all unknown is None."""
    points = [[value for value in values[span] if value is not None] for span in spans(len(values), POINTS)]
    mean = [fmean(point) if point else None for point in points]
    if len(values) <= POINTS:
        return Curve(mean=mean)
    low, high = ([pick(point) if point else None for point in points] for pick in (min, max))
    return Curve(mean=mean, low=low, high=high)


def lag_map(steps: Sequence[StepMetrics]) -> LagMap:
    """Count trajectories by lag and by step, in at most COLUMNS x ROWS cells."""
    columns = [steps[span] for span in spans(len(steps), COLUMNS)]
    rows = list(_rows(max((max(step.lag_histogram, default=0) for step in steps), default=0)))
    return LagMap(
        first=[column[0].step for column in columns],
        last=[column[-1].step for column in columns],
        rows=rows,
        trajectories=[_by_row(lag_histogram(column), rows) for column in columns],
        totals=_by_row(lag_histogram(steps), rows),
    )


def _rows(largest: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of lags from 0 to `largest`, each of the same width."""
    width = -(-(largest + 1) // ROWS)
    for low in range(0, largest + 1, width):
        yield low, low + width - 1


def _by_row(counts: dict[int, int], rows: Sequence[tuple[int, int]]) -> list[int]:
    width, by_row = rows[0][1] - rows[0][0] + 1, Counter[int]()
    for lag, count in counts.items():
        by_row[lag // width] += count
    return [by_row[index] for index in range(len(rows))]

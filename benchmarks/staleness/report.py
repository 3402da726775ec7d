"""The table, the picture and the numbers of all runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from .compositions import ON_POLICY
from .trial import Outcome, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summary = dict[str, dict[str, Any]]
"""Maps a composition and a lag (as text, for JSON) to numbers."""

ALONG_THE_WAY = {
    "ess": "ESS",
    "mask_fraction": "masked",
    "capped_fraction": "capped",
    "clip_fraction": "clipped",
    "kl_behavior": "KL to sampler",
    "grad_norm": "grad norm",
}
"""Means over steps and seeds, and their headings."""
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
LINES = ("-", "--", ":", "-.")


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Return numbers of every composition at every lag, over its seeds."""
    on_policy = {
        (family_of(outcome), outcome.trial.seed): outcome.final
        for outcome in outcomes
        if outcome.trial.lag == 0 and outcome.trial.name == f"{family_of(outcome)}/{ON_POLICY}"
    }
    summary: Summary = {}
    for (name, lag), runs in _by_cell(outcomes).items():
        differences = [
            run.final - on_policy[family_of(run), run.trial.seed]
            for run in runs
            if (family_of(run), run.trial.seed) in on_policy
        ]
        summary.setdefault(name, {})[str(lag)] = {
            "mean": round(fmean(run.final for run in runs), 4),
            "std": _spread([run.final for run in runs]),
            "seeds": len(runs),
            "start": round(fmean(run.held_out[0][1] for run in runs), 4),
            "average": round(fmean(rate for run in runs for _, rate in run.held_out[1:]), 4),
            "best": round(fmean(max(rate for _, rate in run.held_out) for run in runs), 4),
            "against_on_policy": round(fmean(differences), 4) if differences else None,
            "against_on_policy_std": _spread(differences),
            **{curve: _mean_of(runs, curve) for curve in ALONG_THE_WAY},
        }
    return summary


def family_of(outcome: Outcome) -> str:
    """Return grpo or gspo."""
    return outcome.trial.name.partition("/")[0]


def write_table(summary: Summary, settings: Settings, path: Path) -> None:
    """Write pass rates by lag, their differences to on-policy, and means of the runs at the largest lag."""
    lags = sorted({int(lag) for cells in summary.values() for lag in cells})
    seeds = {cell["seeds"] for cells in summary.values() for cell in cells.values()}
    runs = "-".join(str(count) for count in sorted({min(seeds), max(seeds)}))
    parts = [
        f"Held-out pass rate after {settings.steps} steps at learning rate {settings.learning_rate:g}, "
        f"mean ± standard deviation over seeds ({runs} a cell).",
        _table(["correction", *(f"lag {lag}" for lag in lags)], _rows(summary, lags, _pass_rate)),
        f"The same minus that of the family's `{ON_POLICY}` at lag 0, by seed.",
        _table(["correction", *(f"lag {lag}" for lag in lags)], _rows(summary, lags, _difference)),
        f"On the way at lag {lags[-1]}: average and highest held-out pass rate, then means over all steps.",
        _table(["correction", "average", "best", *ALONG_THE_WAY.values()], _way_rows(summary, lags[-1])),
    ]
    path.write_text("\n\n".join(parts) + "\n")


def draw(outcomes: Sequence[Outcome], summary: Summary, path: Path) -> None:
    """Draw a row a family: final pass rate over lag, and pass rate over steps at the largest lag."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families = sorted({family_of(outcome) for outcome in outcomes})
    figure = Figure(figsize=(13, 4.6 * len(families)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(families), 2, squeeze=False, sharey=True)
    for (left, right), family in zip(rows, families, strict=True):
        of_family = [outcome for outcome in outcomes if family_of(outcome) == family]
        names = list(dict.fromkeys(outcome.trial.name for outcome in of_family))
        styles = {name: _style(index) for index, name in enumerate(names)}
        _draw_by_lag(left, {name: summary[name] for name in names}, styles)
        _draw_by_step(right, of_family, styles)
        left.set_ylabel("held-out pass rate")
        left.set_title(f"{family.upper()}: after the last step")
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_by_lag(axes: "Axes", cells: Summary, styles: dict[str, dict[str, Any]]) -> None:
    lags = sorted({int(lag) for by_lag in cells.values() for lag in by_lag})
    for index, (name, by_lag) in enumerate(cells.items()):
        aside = 0.5 * (index / len(cells) - 0.5)  # error bars do not hide each other
        places = [place for place, lag in enumerate(lags) if str(lag) in by_lag]
        found = [by_lag[str(lags[place])] for place in places]
        means, spreads = [cell["mean"] for cell in found], [cell["std"] or 0.0 for cell in found]
        beside = [place + aside for place in places]
        axes.errorbar(beside, means, yerr=spreads, marker="o", markersize=4, capsize=2, elinewidth=0.7, **styles[name])
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_xlabel("lag (steps)")
    _finish(axes)


def _draw_by_step(axes: "Axes", outcomes: Sequence[Outcome], styles: dict[str, dict[str, Any]]) -> None:
    largest = max(outcome.trial.lag for outcome in outcomes)
    for (name, lag), runs in _by_cell(outcomes).items():
        if lag == largest:
            steps = [step for step, _ in runs[0].held_out]
            means = [fmean(run.held_out[place][1] for run in runs) for place in range(len(steps))]
            axes.plot(steps, means, label=name, **styles[name])
    axes.set_title(f"on the way at lag {largest}")
    axes.set_xlabel("learner step")
    _finish(axes)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": LINES[index // len(COLORS) % len(LINES)],
        "linewidth": 1.5,
    }


def _finish(axes: "Axes") -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _by_cell(outcomes: Iterable[Outcome]) -> dict[tuple[str, int], list[Outcome]]:
    cells: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.trial.name, outcome.trial.lag), []).append(outcome)
    return cells


def _spread(values: Sequence[float]) -> float | None:
    return round(stdev(values), 4) if len(values) > 1 else None


def _mean_of(runs: Sequence[Outcome], curve: str) -> float | None:
    """Return the mean over the steps where it is finite; None where no step reports it."""
    values = [value for run in runs for value in run.curves.get(curve, ()) if value is not None]
    return float(f"{fmean(values):.4g}") if values else None


def _rows(summary: Summary, lags: Sequence[int], cell: Any) -> list[list[str]]:
    return [
        [name, *(cell(by_lag[str(lag)]) if str(lag) in by_lag else "" for lag in lags)]
        for name, by_lag in summary.items()
    ]


def _pass_rate(cell: dict[str, Any]) -> str:
    return f"{cell['mean']:.3f}" + ("" if cell["std"] is None else f" ± {cell['std']:.3f}")


def _difference(cell: dict[str, Any]) -> str:
    difference, spread = cell["against_on_policy"], cell["against_on_policy_std"]
    return "" if difference is None else f"{difference:+.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def _way_rows(summary: Summary, lag: int) -> list[list[str]]:
    rows = []
    for name, by_lag in summary.items():
        if (cell := by_lag.get(str(lag))) is not None:
            rates = [f"{cell[rate]:.3f}" for rate in ("average", "best")]
            numbers = [cell[curve] for curve in ALONG_THE_WAY]
            rows.append([name, *rates, *("" if number is None else f"{number:.3g}" for number in numbers)])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

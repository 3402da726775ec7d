"""The table and the numbers of all runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .compositions import ON_POLICY
from .trial import Outcome, Settings

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
    """Write pass rates by lag, and means of the runs at the largest lag."""
    lags = sorted({int(lag) for cells in summary.values() for lag in cells})
    rates = [
        [name, *(_pass_rate(by_lag[str(lag)]) if str(lag) in by_lag else "" for lag in lags)]
        for name, by_lag in summary.items()
    ]
    last = str(lags[-1])
    means = [[name, *(_shown(of[last][key]) for key in ALONG_THE_WAY)] for name, of in summary.items() if last in of]
    parts = [
        f"Held-out pass rate after {settings.steps} steps at learning rate {settings.learning_rate:g}, "
        "mean ± standard deviation over seeds.",
        _table(["correction", *(f"lag {lag}" for lag in lags)], rates),
        f"Means over all steps at lag {last}.",
        _table(["correction", *ALONG_THE_WAY.values()], means),
    ]
    path.write_text("\n\n".join(parts) + "\n")


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


def _pass_rate(cell: dict[str, Any]) -> str:
    return f"{cell['mean']:.3f}" + ("" if cell["std"] is None else f" ± {cell['std']:.3f}")


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

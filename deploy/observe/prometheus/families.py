"""A metric family: its name, its help, and which figures it shows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.broker.schema.status import WorkerInfo

STATES: tuple[str, ...] = get_args(get_type_hints(WorkerInfo)["state"])
"""The states of a worker."""
Figures = Mapping[str, float | None]
"""Figures by the name of their field; None: there is no number now."""


@dataclass(frozen=True)
class Family:
    """One metric that shows one field, or several by the value of a label."""

    name: str
    help: str
    field: str = ""
    """The field of a metric without a label."""
    label: str = ""
    by_label: Mapping[str, str] | None = None
    """The field for each value of the label."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def of(self, figures: Figures) -> Metric:
        """Return the metric with these figures, without samples for those that are None."""
        fields = self.by_label or {"": self.field}
        return metric(self.name, self.help, {value: figures[name] for value, name in fields.items()}, self.label)


def metric(name: str, text: str, values: Mapping[str, float | None], label: str = "") -> Metric:
    """Return a counter if `name` ends in `_total`, else a gauge, with a sample for each value of `label`."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name, text, labels=[label] if label else [])
    for of, value in values.items():
        if value is not None:
            made.add_metric([of] if label else [], value)
    return made


def by_name(name: str, text: str, labels: tuple[str, str], values: Mapping[tuple[str, str], float]) -> Metric:
    """Return the same with two labels, whose values are the keys of `values`."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name, text, labels=labels)
    for of, value in values.items():
        made.add_metric(of, value)
    return made


def shown(families: Iterable[Family], figures: Figures) -> Iterator[Metric]:
    """Yield each of the families with its figures."""
    return (family.of(figures) for family in families)

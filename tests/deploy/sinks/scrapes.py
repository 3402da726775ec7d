"""A reading of an endpoint as a Prometheus server does it."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name, and its labels with their values, sorted."""


def scrape(url: str) -> dict[Sample, float]:
    """Return every figure at the endpoint."""
    with urllib.request.urlopen(url, timeout=240) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def figure(found: dict[Sample, float], name: str, **labels: str) -> float | None:
    """Return one figure, or None where the endpoint has no such figure."""
    return found.get((name, tuple(sorted(labels.items()))))

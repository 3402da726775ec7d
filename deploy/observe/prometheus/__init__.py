"""Serves a role's figures to Prometheus: each process has an endpoint of its own.

    learner ─ event ─► sinks/prometheus.py ─► learner_metrics.RunCollector ┐
    worker ─► worker_metrics.WorkerCollector ──────────────────────────────┴─► exposition.MetricsEndpoint ◄─ GET

    exposition.py               a metric's name, help and the figures that it shows; the endpoint of a process
    grafana.json, alerts.yaml   a dashboard and alerting rules, which `headway metrics` prints

A name is `headway_<part>_<what>_<unit>`, in seconds, bytes, tokens and steps; names in `_total` only grow while the
process lives. The invariant: a scrape waits for nothing but a copy of figures, and training never waits for a scrape.
"""

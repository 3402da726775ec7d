"""A run as it is now, for a terminal, for metric sinks, for Prometheus, for a collector of traces and for a browser."""

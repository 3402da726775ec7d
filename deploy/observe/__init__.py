"""A run as it is now, for a terminal, for metric sinks, for Prometheus and for a browser."""

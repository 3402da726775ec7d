"""A run as it is now, for a terminal, for metric sinks and for Prometheus."""

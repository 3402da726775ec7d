"""A run as it is now, for a terminal and for metric sinks."""

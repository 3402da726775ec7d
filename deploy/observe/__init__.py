"""A run as it is now, for a terminal."""

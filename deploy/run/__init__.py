"""A run's directory: its files, the process that holds it, and how it is read again."""

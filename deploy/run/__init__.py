"""A run's directory: what lies in it, who holds it, how it is read again."""

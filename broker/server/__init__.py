"""The embedded server, and which user of any server may do what."""

"""The connection to a server: its address, its nodes, shared round trips, and retries through outages."""

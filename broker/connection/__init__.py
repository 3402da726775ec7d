"""The way to a server: its address, its nodes, round trips that are shared, outages that are waited out."""

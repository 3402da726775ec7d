"""How bytes travel: broadcast to a group that formed in a rendezvous, or pull over HTTP."""

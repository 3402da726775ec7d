"""Programs that tests start; no module beside them has a name of the standard library."""

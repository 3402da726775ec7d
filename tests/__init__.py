"""The tests mirror the rooms; `end_to_end/` runs whole systems of real processes."""

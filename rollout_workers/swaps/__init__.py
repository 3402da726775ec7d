"""New weights in a running engine: received, swapped in turns, verified; and who has the device."""

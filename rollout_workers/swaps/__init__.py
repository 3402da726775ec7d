"""New weights in a running engine, swapped in turns and verified; and a device that engine and learner use in turns."""

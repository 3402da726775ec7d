"""New weights in a running engine: received, swapped in turns and verified; and who uses the device."""

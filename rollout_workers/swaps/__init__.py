"""New weights in a running engine, swapped in turns and verified; and a device that engine and learner use in turns.

    subscriber ─► weights.py ─► turns.py: the broker gives turns ─► engine.swap_weights ─► verify, probe ─► held
                     ▲
    adapter_base.py ─┤   the weights below adapters: from the model's files, or pulled
    colocation.py ───┘   wakes the engine in the phase `generate`, puts it to sleep in the phase `train`

The folder knows engines by their seam, and weight versions by `weightsync/deliveries.py`; it knows no samples.

The invariant: only verified weights count as held, and an engine samples with nothing else. A missing turn delays a
swap and never prevents it.
"""

"""New weights in a running engine, swapped in turns and verified; the lock on a device that engine and learner share.

    subscriber ─► engine_weights.py ─► a swap turn (engine_turns.py) ─► engine.swap_weights ─► verified ─► held
                     ▲    ▲
                     │    └ the weights below adapters: from the model's files, or pulled
    engine_turns.py ─┘ wakes the engine in the phase `generate`, puts it to sleep in the phase `train`

The folder knows engines by their seam, and weight versions by `weightsync`; it knows no samples.

The invariant: only verified weights count as held, and an engine samples with nothing else. A missing turn delays a
swap and never prevents it.
"""

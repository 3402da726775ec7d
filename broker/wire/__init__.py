"""Frames: the structs that cross a process, as bytes and back, checked and bounded.

    struct ─► checks.py ─► codec.py ─► bytes        buffers.py: arrays under zstd
    struct ◄─ checks.py ◄─ codec.py ◄─ bytes

`codec.py` knows how each struct of `broker/schema/` lies in a body, and the header of a frame: its checksum and the
number of each kind. `checks.py` compares the parts of a sample with each other. `rows.py` cuts an agent's episode, a
tree of turns, into rows.

The invariant: any bytes at all end in a value that passed its checks or in a FrameError, within bounded memory.
Nothing is ever unpickled.
"""

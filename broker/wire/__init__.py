"""Frames: what crosses a process, as bytes and back, checked and bounded."""

"""Frames: the structs that cross a process, as bytes and back, checked and bounded."""

"""A disk that gives back other bytes than it was given."""

from pathlib import Path


def flip_bits(path: Path) -> None:
    """In the middle, and as many bytes as before: torch loads such a file without a word."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(bytes(content))

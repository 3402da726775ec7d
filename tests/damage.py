"""Damage to files: a disk that returns other bytes than were written."""

from pathlib import Path


def flip_bits(path: Path) -> None:
    """Flip bits in the middle of a file, whose size stays the same: torch loads such a file without an error."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(bytes(content))

"""The words by which torch's process groups form: who says each of them, and of which form it is.

gloo and NCCL copy these words into structures of C as they come, so one of another form can end the process that reads
it. A word is taken from the rank that has to say it alone, and refused unless it has the form that this file describes.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

LEARNER_RANK = 0
LONGEST_WORD = 1 << 16
"""In bytes. torch stores addresses and names of NCCL groups, which are shorter."""
_NCCL_ID_BYTES = 128
_SIZE = struct.Struct("<Q")
_ADDRESS_BYTES = 136
"""A `sockaddr_storage` and the number of a connection: `gloo::transport::tcp::Address`."""
_INET, _INET6 = 2, 10
_HOST_NAME = re.compile(rb"[A-Za-z0-9._-]{1,255}")
_LARGEST_NUMBER = 1 << 31
_IPC_PLACE = re.compile(rb"/proc/[0-9]{1,10}/fd/[0-9]{1,10}/s")


@dataclass(frozen=True)
class Words:
    """The words of one transport's groups."""

    speaker: Callable[[str], int | None] = lambda key: None
    """Returns the rank that says what lies under a key; None where any rank may."""
    fault: Callable[[bytes, int], str] = lambda word, size: ""
    """Returns what is wrong with a word that one rank has to say, in a group of so many ranks, or ""."""


def _rank_of(key: str) -> int | None:
    """Return the rank of gloo's key, which ends with it."""
    number = key.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def _root_of(key: str) -> int | None:
    """Return the rank of NCCL's key, whose last part is a number. Where a group has several roots, each names itself
    under a key of another form."""
    return None if _rank_of(key) is None else LEARNER_RANK


def _gloo_fault(word: bytes, size: int) -> str:
    """Check gloo's word of one rank: its host's name and its address, each after its length, and the number of its
    connection to each rank (`gloo::transport::tcp::Rank`)."""
    name, rest = _cut(word)
    address, numbers = _cut(rest)
    if name is None or not _HOST_NAME.fullmatch(name):
        return "its host has no name"
    if address is None or len(address) != _ADDRESS_BYTES:
        return "it is no address"
    if len(numbers) != size * _SIZE.size:
        return f"it has not a number for each of {size} ranks"
    if any(number >= _LARGEST_NUMBER for (number,) in _SIZE.iter_unpack(numbers)):
        return "a number of a connection is out of bounds"
    return _address_fault(address)


def _cut(word: bytes) -> tuple[bytes | None, bytes]:
    """Return a field that begins with its length, or None where there is not so much, and what follows it."""
    if len(word) < _SIZE.size:
        return None, b""
    (length,) = _SIZE.unpack_from(word)
    rest = word[_SIZE.size :]
    return (None, b"") if length > len(rest) else (rest[:length], rest[length:])


def _address_fault(address: bytes) -> str:
    """Check a `sockaddr_storage`, to which gloo connects at once."""
    family, port = int.from_bytes(address[:2], "little"), int.from_bytes(address[2:4], "big")
    if family not in (_INET, _INET6):
        return f"its address is of family {family}"
    host = ip_address(address[4:8] if family == _INET else address[8:24])
    is_of_no_host = host.is_multicast or host.is_unspecified or (family == _INET and host.is_reserved)
    if not port or is_of_no_host:
        return f"nothing listens at {host}, port {port}"
    return ""


def _nccl_fault(word: bytes, size: int) -> str:
    return "" if len(word) == _NCCL_ID_BYTES else f"the name of an NCCL group has {_NCCL_ID_BYTES} bytes"


def _ipc_fault(word: bytes, size: int) -> str:
    return "" if _IPC_PLACE.fullmatch(word) else "it is no place of a socket"


_WORDS = {
    "gloo": Words(_rank_of, _gloo_fault),
    "nccl": Words(_root_of, _nccl_fault),
    "ipc": Words(lambda key: LEARNER_RANK, _ipc_fault),
}


def words_of(transport: str) -> Words:
    """Return what is known of a transport's words. Members of a group of another kind (ucc, a class of the user's own)
    may each say any word, which is bounded in length alone."""
    return _WORDS.get(transport, Words())

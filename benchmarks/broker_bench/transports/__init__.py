"""The compared ways of moving trajectories, by name. A transport is imported when it is used."""

from importlib import import_module
from importlib.util import find_spec

from .base import Transport

_PLACES = {
    "headway": "headway:Headway",
    "headway_segments": "headway:HeadwayInSegments",
    "streams": "streams:PipelinedStreams",
    "streams_plain_calls": "streams:Streams",
    "xread_one": "one_by_one:OneByOne",
    "xread_one_lists": "one_by_one:OneByOneLists",
    "zeromq": "zeromq:ZeroMQ",
    "ray_queue": "ray_queue:RayQueue",
    "transfer_queue": "transfer_queue:TransferQueue",
}
_NEEDS = {"zeromq": "zmq", "ray_queue": "ray", "transfer_queue": "transfer_queue"}

NAMES = tuple(_PLACES)
ON_A_SERVER = tuple(name for name in NAMES if name not in _NEEDS)
ON_RAY = ("ray_queue", "transfer_queue")


def is_installed(name: str) -> bool:
    """Whether all packages that the transport needs beyond Headway's own dependencies are installed."""
    return name not in _NEEDS or find_spec(_NEEDS[name]) is not None


def open_transport(name: str) -> Transport:
    module, _, kind = _PLACES[name].partition(":")
    transport: Transport = getattr(import_module(f".{module}", __name__), kind)()
    return transport

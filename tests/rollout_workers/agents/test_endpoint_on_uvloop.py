"""Workers run on uvloop, whose transports are of no class of asyncio's: the endpoint serves and refuses there, too."""

import asyncio

import uvloop

from headway.rollout_workers.agents.endpoint.connections import EndpointSettings
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.player import OpenSessions

ASKED = b"POST /s/nobody/v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"


async def first_lines() -> tuple[bytes, bytes]:
    """Return how one connection is answered, and another one beside it, for which there is no room."""
    endpoint = await Endpoint.start(OpenSessions(), settings=EndpointSettings(connections=1))
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(ASKED)
        served = await reader.readline()
        more, beside = await asyncio.open_connection(endpoint.host, endpoint.port)
        refused = await more.readline()
        for one in (writer, beside):
            one.close()
        return served, refused
    finally:
        await endpoint.close()


def test_the_endpoint_serves_and_refuses_on_the_loop_of_workers() -> None:
    served, refused = uvloop.run(asyncio.wait_for(first_lines(), 240))
    assert served.startswith(b"HTTP/1.1 410")
    assert refused.startswith(b"HTTP/1.1 503")

"""An agent's way to its worker's endpoint: JSON over HTTP."""

import asyncio
from typing import Any

from .episode import AgentCallError, EpisodeOverError

CONNECT_S = 60.0
NO_ROOM = (429, 503)


class EndpointClient:
    """Posts JSON. It opens its connections at the first call, in the event loop of that call."""

    def __init__(self) -> None:
        self._session: Any = None

    async def post(self, base_url: str, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of the answer, for which it waits where the endpoint has no room. Raises AgentCallError for a
        refused call, EpisodeOverError where the episode has ended or its worker is gone."""
        while True:
            status, answer, again_s = await self._posted(f"{base_url}/{path}", body)
            if status == 200:
                return answer
            told = answer.get("error") if isinstance(answer, dict) else None
            told = told if isinstance(told, dict) else {}
            message = told.get("message", answer)
            if status in (400, 413):
                raise AgentCallError(str(message))
            if status not in NO_ROOM or told.get("code") == "closing":
                raise EpisodeOverError(f"{message} (HTTP {status})")
            await asyncio.sleep(again_s)

    async def _posted(self, url: str, body: dict[str, Any]) -> tuple[int, Any, float]:
        """Return the status and JSON of an answer, and the seconds after which to ask again if there was no room."""
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.post(url, json=body) as response:
                answer = await response.json(content_type=None)
                return response.status, answer, float(response.headers.get("Retry-After", "1"))
        except aiohttp.ClientError as error:
            raise EpisodeOverError(f"the worker's endpoint does not answer: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

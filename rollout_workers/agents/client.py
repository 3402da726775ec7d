"""An agent's way to its worker's endpoint: JSON over HTTP."""

from typing import Any

from .episode import AgentCallError, EpisodeOverError

CONNECT_S = 60.0


class EndpointClient:
    """Posts JSON. It opens its connections at the first call, in the event loop of that call."""

    def __init__(self) -> None:
        self._session: Any = None

    async def post(self, base_url: str, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of the answer. Raises AgentCallError for a refused call, EpisodeOverError where the episode
        has ended or its worker is gone."""
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.post(f"{base_url}/{path}", json=body) as response:
                answer = await response.json(content_type=None)
        except aiohttp.ClientError as error:
            raise EpisodeOverError(f"the worker's endpoint does not answer: {error}") from error
        if response.status == 200:
            return answer
        told = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = told.get("message", told) if isinstance(told, dict) else told
        if response.status in (400, 413):
            raise AgentCallError(str(message))
        raise EpisodeOverError(f"{message} (HTTP {response.status})")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

"""A crowd of clients, as a process of its own: `python -m ... PORT CONNECTIONS SESSION...`.

Each client has a connection of its own, sends one call over it, and keeps it open until all have heard something. What
they have heard is printed as JSON: the number of each status, of refusals without Retry-After, and of connections that
were cut off without a word.
"""

import asyncio
import json
import resource
import sys
from collections import Counter

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]})


class Crowd:
    """Clients side by side."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heard = Counter[str]()
        self._all_heard = asyncio.Event()

    async def gather(self, number: int, sessions: list[str]) -> None:
        """Have all of them ask, and hear."""
        asking = [asyncio.create_task(self._ask(i, sessions[i % len(sessions)], number)) for i in range(number)]
        await asyncio.gather(*asking)

    async def _ask(self, number: int, session: str, of: int) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**14)
            head = (
                f"POST /s/{session}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nIdempotency-Key: {number}\r\n"
                f"Content-Length: {len(BODY)}\r\n\r\n"
            )
            writer.write((head + BODY).encode())
            status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            code = status.split()[1]
            is_told = code == "200" or any(one.lower().startswith("retry-after:") for one in headers)
            self.heard[code if is_told else f"{code} untold"] += 1
        except (OSError, EOFError) as error:
            self.heard[f"cut off: {error!r}"] += 1
        if self.heard.total() == of:
            self._all_heard.set()
        await self._all_heard.wait()
        if writer is not None:
            writer.close()


async def main() -> None:
    """Ask, and print what was heard."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, number, *sessions = sys.argv[1:]
    crowd = Crowd(int(port))
    await crowd.gather(int(number), sessions)
    print(json.dumps(crowd.heard))


if __name__ == "__main__":
    asyncio.run(main())

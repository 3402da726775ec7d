"""The endpoint over real sockets: whose session a request is, what is delivered, what is bounded, what is refused."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvloop

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.calls import ChatCall
from headway.rollout_workers.agents.client import EndpointClient
from headway.rollout_workers.agents.conversation import ParsedAnswer
from headway.rollout_workers.agents.endpoint.connections import EndpointSettings
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.episode import AgentCallError, EpisodeOverError

from .scripted import ScriptedSession, ScriptedSessions

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
MINUTES = 300.0


class Bench:
    """An endpoint with the sessions `one` and `two`, and a client."""

    def __init__(self, endpoint: Endpoint, sessions: ScriptedSessions, client: aiohttp.ClientSession) -> None:
        self.endpoint, self.sessions, self.client = endpoint, sessions, client
        self.one, self.two = (self.session(name) for name in ("one", "two"))
        self.base = endpoint.url_of("one")

    def session(self, name: str) -> ScriptedSession:
        session = self.sessions.by_name[name]
        assert isinstance(session, ScriptedSession)
        return session

    async def post(self, path: str, body: Any = HELLO, **more: Any) -> tuple[int, Any]:
        url = path if path.startswith("http") else f"{self.base}/{path}"
        async with self.client.post(url, json=body, **more) as response:
            return response.status, await response.json()

    async def raw(self, body: dict[str, Any] = HELLO, headers: str = "") -> asyncio.StreamWriter:
        """Send a call over a connection of its own, and return the connection."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.endpoint.port, limit=2**12)
        encoded = json.dumps(body)
        head = f"POST /s/one/v1/chat/completions HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(encoded)}\r\n\r\n"
        writer.write((head + encoded).encode())
        await writer.drain()
        return writer


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(MINUTES):
        while not holds():  # noqa: ASYNC110 - nobody notifies
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened(settings: EndpointSettings | None = None) -> AsyncIterator[Bench]:
    sessions = ScriptedSessions(one=ScriptedSession(), two=ScriptedSession())
    endpoint = await Endpoint.start(sessions, settings=settings)
    async with aiohttp.ClientSession() as client:
        try:
            yield Bench(endpoint, sessions, client)
        finally:
            await endpoint.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as one:
        yield one


@pytest.fixture
async def bounded() -> AsyncIterator[Bench]:
    settings = EndpointSettings(
        body_bytes=10_000, body_values=500, calls=3, session_calls=2, quiet_s=0.01, connections=8, read_s=0.2
    )
    async with opened(settings) as one:
        yield one


async def test_a_session_is_named_by_path_or_by_key(bench: Bench) -> None:
    root = f"http://127.0.0.1:{bench.endpoint.port}"
    for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "two"}, {"Authorization": "x", "x-api-key": "two"}):
        assert (await bench.post(f"{root}/v1/chat/completions", headers=headers))[0] == 200
    assert (await bench.post("chat/completions", headers={"Authorization": "Bearer EMPTY"}))[0] == 200
    assert len(bench.two.calls) == 3
    assert len(bench.one.calls) == 1
    status, error = await bench.post(f"{root}/v1/chat/completions")
    assert (status, error["error"]["type"]) == (401, "authentication_error")
    assert bench.endpoint.counts == {"answered": 4, "unauthorized": 1}


async def test_an_ended_session_and_another_episodes_key_are_refused(bench: Bench) -> None:
    status, error = await bench.post(bench.endpoint.url_of("gone") + "/chat/completions")
    assert (status, error["error"]["type"]) == (410, "session_ended_error")
    for headers in ({"Authorization": "Bearer two"}, {"X-Session-ID": "two"}, {"x-api-key": "two"}):
        status, error = await bench.post("chat/completions", headers=headers)
        assert status == 400
        assert "contradict" in error["error"]["message"]
    assert (await bench.post("chat/completions", headers={"X-Session-ID": "sticky-7"}))[0] == 200
    assert len(bench.one.calls) == 1
    assert bench.endpoint.counts == {"ended": 1, "refused": 3, "answered": 1}


async def test_a_lease_may_have_any_characters(bench: Bench) -> None:
    name = "a/b c:1%?#ü"
    bench.sessions.by_name[name] = ScriptedSession()
    assert (await bench.post(bench.endpoint.url_of(name) + "/chat/completions"))[0] == 200
    assert len(bench.session(name).calls) == 1


async def test_headers_say_what_the_body_does_not(bench: Bench) -> None:
    headers = {"Idempotency-Key": "k1", "x-stainless-retry-count": "2", "X-Headway-Role": "auxiliary"}
    assert (await bench.post("chat/completions", headers=headers))[0] == 200
    (call,) = bench.one.calls
    assert (call.key, call.is_retry, call.role) == ("k1", True, "auxiliary")
    assert (await bench.post("chat/completions", headers={"x-stainless-retry-count": "0"}))[0] == 200
    assert not bench.one.calls[1].is_retry
    assert (await bench.post("chat/completions", headers={"X-Headway-Role": "boss"}))[0] == 400
    assert (await bench.post("chat/completions", headers={"Idempotency-Key": "k" * 257}))[0] == 400
    assert bench.endpoint.counts == {"answered": 2, "auxiliary": 1, "retries": 1, "refused": 2}


async def test_the_same_call_after_its_answer_asks_for_another_one(bench: Bench) -> None:
    await bench.post("chat/completions")
    _, answer = await bench.post("chat/completions")
    assert answer["choices"][0]["message"]["content"] == "answer 2"
    assert not bench.one.lost


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_gets_the_recorded_answer_when_it_asks_again(bench: Bench, streams: bool) -> None:
    bench.one.gate = asyncio.Event()
    writer = await bench.raw(HELLO | {"stream": streams})
    await until(lambda: bench.one.waiting == 1)
    writer.transport.abort()
    await until(lambda: bench.one.waiting == 0)
    again = asyncio.create_task(bench.post("chat/completions"))
    await until(lambda: bench.one.waiting == 1)
    bench.one.gate.set()
    status, answer = await again
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "answer 1")
    assert len(bench.one.calls) == 1
    assert bench.endpoint.counts == {"disconnected": 1, "answered": 1}


async def test_an_answer_that_comes_as_its_client_leaves_is_lost(bench: Bench) -> None:
    """The call has its answer before the endpoint hears that the client has left."""
    bench.one.gate = asyncio.Event()
    writer = await bench.raw()
    await until(lambda: bench.one.waiting == 1)
    bench.one.gate.set()
    writer.transport.abort()
    await until(lambda: sum(bench.endpoint.counts.values()) == 1)
    number = 1 if "disconnected" in bench.endpoint.counts else 2  # the kernel may have taken the answer just before
    _, answer = await bench.post("chat/completions")
    assert answer["choices"][0]["message"]["content"] == f"answer {number}"


async def test_what_the_client_does_not_read_is_lost(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    size = 50_000_000
    bench.one.speak = lambda call, number: ParsedAnswer(content="x" * size)
    writer = await bench.raw()
    await until(lambda: len(bench.one.calls) == 1 and not bench.one.waiting)
    await asyncio.sleep(0.1)
    assert not bench.endpoint.counts
    writer.transport.abort()
    await until(lambda: bench.endpoint.counts == {"disconnected": 1})
    assert len(bench.one.lost) == 1
    _, answer = await bench.post("chat/completions")
    assert len(answer["choices"][0]["message"]["content"]) == size
    assert len(bench.one.calls) == 1
    assert bench.endpoint.counts == {"disconnected": 1, "answered": 1}
    assert not caplog.records, "a client could fill the log"


async def test_a_client_that_never_reads_is_cut_off() -> None:
    async with opened(EndpointSettings(write_s=0.1)) as bench:
        bench.one.speak = lambda call, number: ParsedAnswer(content="x" * 50_000_000)
        writer = await bench.raw()
        await until(lambda: bench.endpoint.counts.get("disconnected") == 1)
        assert len(bench.one.lost) == 1
        writer.transport.abort()


async def test_a_quiet_stream_says_that_it_waits_and_tells_a_late_error(bounded: Bench) -> None:
    def fail(call: ChatCall, number: int) -> ParsedAnswer:
        raise RuntimeError("secret")

    bounded.one.gate = asyncio.Event()
    bounded.one.speak = fail
    async with bounded.client.post(f"{bounded.base}/chat/completions", json=HELLO | {"stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert (await response.content.readline()).startswith(b":")
        bounded.one.gate.set()
        rest = (await response.read()).decode()
    assert '"type":"server_error"' in rest
    assert "secret" not in rest
    assert bounded.endpoint.counts == {"failed": 1}


async def test_a_fault_inside_is_logged_and_not_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: ChatCall, number: int) -> ParsedAnswer:
        raise RuntimeError("secret")

    bench.one.speak = fail
    with caplog.at_level(logging.ERROR):
        status, error = await bench.post("chat/completions")
        assert (await bench.post("messages", HELLO | {"max_tokens": 5}))[1]["error"]["type"] == "api_error"
    assert (status, error["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(error)
    assert "secret" in caplog.text
    assert bench.endpoint.counts == {"failed": 2}


async def test_requests_are_bounded_in_size(bounded: Bench) -> None:
    large = {"messages": [{"role": "user", "content": "x" * 20_000}]}
    assert (await bounded.post("chat/completions", large))[0] == 413

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    async with bounded.client.post(f"{bounded.base}/messages", data=trickle()) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (413, "request_too_large")
    many = {"messages": [{"role": "user", "content": []} for _ in range(300)]}
    assert (await bounded.post("chat/completions", many))[0] == 413
    assert bounded.endpoint.counts == {"too_large": 3}


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff", b'{"a":' * 400, b'{"messages": NaN}', b'{"n":1e999}'])
async def test_what_is_no_json_object_is_refused(bounded: Bench, body: bytes) -> None:
    for path in ("chat/completions", "messages", "responses", "turn", "reward", "inference/v1/generate"):
        async with bounded.client.post(f"{bounded.base}/{path}", data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"]
    assert bounded.endpoint.counts["unreadable"] == 6
    assert not bounded.one.calls


async def test_a_body_that_does_not_come_ends_its_request(bounded: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bounded.endpoint.port)
    writer.write(b"POST /s/one/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    async with asyncio.timeout(MINUTES):
        assert b"408" in await reader.readline()
    writer.transport.abort()
    assert bounded.endpoint.counts == {"slow": 1}


async def test_a_client_may_wait_for_leave_to_send_its_body(bench: Bench) -> None:
    body = json.dumps(HELLO).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.endpoint.port)
    head = f"Host: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(b"POST /s/one/v1/chat/completions HTTP/1.1\r\n" + head.encode())
    async with asyncio.timeout(MINUTES):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"200 OK" in await reader.readline()
    writer.transport.abort()


async def test_calls_are_bounded_in_number(bounded: Bench) -> None:
    bounded.one.gate = asyncio.Event()
    two = bounded.two
    two.gate = bounded.one.gate
    running = [asyncio.create_task(bounded.post("chat/completions", headers={"Idempotency-Key": k})) for k in "ab"]
    await until(lambda: bounded.one.waiting == 2)
    async with bounded.client.post(f"{bounded.base}/chat/completions", json=HELLO) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    other = bounded.endpoint.url_of("two")
    running.append(asyncio.create_task(bounded.post(f"{other}/chat/completions")))
    await until(lambda: two.waiting == 1)
    async with bounded.client.post(f"{other}/messages", json=HELLO | {"max_tokens": 3}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert (await response.json())["error"]["type"] == "overloaded_error"
    bounded.one.gate.set()
    assert [(await one)[0] for one in running] == [200, 200, 200]
    assert (await bounded.post("chat/completions"))[0] == 200
    assert bounded.endpoint.counts == {"busy": 1, "overloaded": 1, "answered": 4}


async def test_agents_of_ours_wait_for_room(bounded: Bench) -> None:
    client = EndpointClient()
    bounded.one.gate = asyncio.Event()
    turns = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(3)]
    asking = [asyncio.create_task(client.post(bounded.base, "turn", turn)) for turn in turns]
    await until(lambda: bounded.endpoint.counts.get("busy", 0) >= 1)
    bounded.one.gate.set()
    assert sorted([(await one)["content"] for one in asking]) == ["answer 1", "answer 2", "answer 3"]
    with pytest.raises(AgentCallError, match="odd"):
        await client.post(bounded.base, "turn", {"odd": 1})
    with pytest.raises(EpisodeOverError, match="410"):
        await client.post(bounded.endpoint.url_of("gone"), "turn", turns[0])
    await client.close()


async def test_a_call_without_end_is_given_up() -> None:
    async with opened(EndpointSettings(call_s=0.05)) as bench:
        bench.one.gate = asyncio.Event()
        status, error = await bench.post("chat/completions")
        assert (status, error["error"]["type"]) == (504, "timeout_error")
        assert bench.one.waiting == 0
        assert bench.endpoint.counts == {"timed_out": 1}


async def test_connections_are_bounded_in_number(bounded: Bench) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", bounded.endpoint.port) for _ in range(8)]
    reader, writer = await asyncio.open_connection("127.0.0.1", bounded.endpoint.port)
    async with asyncio.timeout(MINUTES):
        assert b"503" in await reader.read()
    for _, one in [*idle, (reader, writer)]:
        one.transport.abort()
    async with asyncio.timeout(MINUTES):
        while True:  # until the endpoint has seen that they are gone
            async with bounded.client.post(f"{bounded.base}/chat/completions", json=HELLO) as response:
                if response.status == 200:
                    break
    assert bounded.endpoint.counts["connections_refused"] >= 1


async def test_thousands_of_connections_leave_nothing_behind() -> None:
    """A third of the clients leaves while its calls are sampled."""
    async with opened(EndpointSettings(session_calls=4096)) as bench:
        await leave_nothing_behind(bench, 2000)


async def leave_nothing_behind(bench: Bench, number: int) -> None:
    bench.one.gate = asyncio.Event()
    endpoint, url = bench.endpoint, f"{bench.base}/chat/completions"
    tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async def ask(i: int, client: aiohttp.ClientSession) -> int:
        async with client.post(url, json=HELLO, headers={"Idempotency-Key": str(i)}) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        asking = [asyncio.create_task(ask(i, client)) for i in range(number)]
        await until(lambda: bench.one.waiting == number)
        for one in asking[::3]:
            one.cancel()
        bench.one.gate.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
    left = len(asking[::3])
    assert found.count(200) == number - left
    await until(lambda: sum(endpoint.counts.values()) == number)
    assert endpoint.counts["answered"] >= number - left
    await until(lambda: len(asyncio.all_tasks()) <= tasks and len(os.listdir("/proc/self/fd")) <= descriptors)
    assert len(bench.one.calls) == number


async def test_closing_ends_calls_and_connections(bench: Bench) -> None:
    bench.one.gate = asyncio.Event()
    running = asyncio.create_task(bench.post("chat/completions"))
    await until(lambda: bench.one.waiting == 1)
    await bench.endpoint.close()
    status, error = await running
    assert (status, error["error"]["code"]) == (503, "closing")
    assert bench.one.waiting == 0
    with pytest.raises(aiohttp.ClientConnectionError):
        await bench.post("chat/completions")


async def test_unknown_paths_say_which_ones_there_are(bench: Bench) -> None:
    status, error = await bench.post("completions")
    assert (status, error["error"]["type"]) == (404, "not_found_error")
    assert "chat/completions" in error["error"]["message"]
    status, error = await bench.post("completions", headers={"anthropic-version": "2023-06-01"})
    assert error["type"] == "error"
    async with bench.client.get(f"{bench.base}/messages") as response:
        assert response.status == 405


async def test_junk_on_a_connection_harms_nobody(bench: Bench) -> None:
    for junk in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"A" * 100_000, b"\r\n" * 1000):
        _, writer = await asyncio.open_connection("127.0.0.1", bench.endpoint.port)
        writer.write(junk)
        writer.write_eof()
        await asyncio.sleep(0.01)
        writer.transport.abort()
    assert (await bench.post("chat/completions"))[0] == 200


async def test_a_port_that_is_taken_is_an_error_with_its_number(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=str(bench.endpoint.port)):
        await Endpoint.start(bench.sessions, port=bench.endpoint.port)


def test_it_answers_and_refuses_in_the_event_loop_of_workers() -> None:
    async def answered() -> list[int]:
        sessions = ScriptedSessions(one=ScriptedSession())
        endpoint = await Endpoint.start(sessions, settings=EndpointSettings(connections=1))
        url = f"{endpoint.url_of('one')}/chat/completions"
        async with aiohttp.ClientSession() as first, aiohttp.ClientSession() as second:
            found = []
            for client in (first, second, first):
                async with client.post(url, json=HELLO) as response:
                    found.append(response.status)
                    await response.read()
        await endpoint.close()
        return found

    assert uvloop.run(answered()) == [200, 503, 200]

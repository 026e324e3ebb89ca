"""The HTTP server, byte for byte, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sandmill.control.http import HEAD_LIMIT_BYTES, QUEUED, Answer, Request, Server, segments


class Echo:
    """Answers with what it was asked; some paths wait, some never deliver."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.undelivered = 0
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.left = asyncio.Event()

    def body_limit(self, method: str, path: str) -> int:
        return 1000

    def refusal(self, status: int, code: str, message: str) -> Answer:
        return Answer(status, code.encode())

    async def answer(self, request: Request) -> Answer:
        self.started.append(request.path)
        self.began.set()
        if request.path.startswith("/wait"):
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.path)
                raise
        if request.path == "/stubborn":
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    pass
        if request.path == "/stream":
            return Answer(200, content_type=b"text/plain", stream=self.pieces())
        said = f"{request.method} {request.path}?{request.query} ".encode() + request.body
        return Answer(200, said, b"text/plain", undelivered=self.lost)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one "
            await self.go.wait()
            yield b""
            yield b"two"
        finally:
            self.cancelled.append("stream")
            self.left.set()

    def lost(self) -> None:
        self.undelivered += 1


@asynccontextmanager
async def serving(echo: Echo) -> AsyncIterator[tuple[Server, Callable[[], "asyncio.Future[Client]"]]]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = Server(echo)
    port = await server.listen(listener)

    def connect() -> "asyncio.Future[Client]":
        return asyncio.ensure_future(Client.connect(port))

    try:
        yield server, connect
    finally:
        await server.close(0.0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def connect(port: int) -> "Client":
        return Client(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, text: str) -> None:
        self.writer.write(text.replace("\n", "\r\n").encode())

    async def read(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode()
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
        return int(line.split()[1]), headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def at_end(self) -> bool:
        return await asyncio.wait_for(self.reader.read(), 5) == b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


async def test_requests_one_after_the_other() -> None:
    async with serving(Echo()) as (_, connect):
        client = await connect()
        for number in range(3):
            client.send(f"GET /a%2Fb?x={number} HTTP/1.1\nHost: h\n\n")
            assert await client.read() == (200, _headers(15), f"GET /a%2Fb?x={number} ".encode())
        await client.close()


def _headers(length: int) -> dict[str, str]:
    return {"content-type": "text/plain", "content-length": str(length)}


async def test_pipelined_requests_are_answered_in_order() -> None:
    echo = Echo()
    async with serving(echo) as (_, connect):
        client = await connect()
        client.send("GET /wait HTTP/1.1\nHost: h\n\n" + "GET /next HTTP/1.1\nHost: h\n\n" * (3 * QUEUED))
        await echo.began.wait()
        await asyncio.sleep(0.01)
        assert echo.started == ["/wait"]
        echo.go.set()
        assert (await client.read())[2] == b"GET /wait? "
        for _ in range(3 * QUEUED):
            assert (await client.read())[2] == b"GET /next? "
        await client.close()


async def test_bodies_of_known_and_unknown_length() -> None:
    async with serving(Echo()) as (_, connect):
        client = await connect()
        client.send("POST /x HTTP/1.1\nHost: h\nContent-Length: 5\n\nhello")
        assert (await client.read())[2] == b"POST /x? hello"
        client.send("POST /x HTTP/1.1\nHost: h\nTransfer-Encoding: chunked\n\n3\nhel\n2\nlo\n0\n\n")
        assert (await client.read())[2] == b"POST /x? hello"
        await client.close()


async def test_expect_continue() -> None:
    async with serving(Echo()) as (_, connect):
        client = await connect()
        client.send("POST /x HTTP/1.1\nHost: h\nContent-Length: 2\nExpect: 100-continue\n\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send("ok")
        assert (await client.read())[2] == b"POST /x? ok"
        await client.close()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ("NONSENSE\n\n", 400, b"invalid_request"),
        ("POST /x HTTP/1.1\nHost: h\nContent-Length: 1001\n\n" + "x" * 1001, 413, b"request_too_large"),
        ("GET /x HTTP/1.1\nX: " + "y" * (HEAD_LIMIT_BYTES + 10), 431, b"request_too_large"),
    ],
)
async def test_what_is_no_request_is_refused_and_closed(sent: str, status: int, code: bytes) -> None:
    async with serving(Echo()) as (_, connect):
        client = await connect()
        client.send(sent)
        found, headers, body = await client.read()
        assert (found, body, headers["connection"]) == (status, code, "close")
        assert await client.at_end()
        await client.close()


async def test_connection_close_is_obeyed() -> None:
    async with serving(Echo()) as (_, connect):
        client = await connect()
        client.send("GET /x HTTP/1.1\nHost: h\nConnection: close\n\n")
        assert (await client.read())[1]["connection"] == "close"
        assert await client.at_end()
        await client.close()


async def test_a_client_that_goes_cancels_its_call() -> None:
    echo = Echo()
    async with serving(echo) as (server, connect):
        client = await connect()
        client.send("GET /wait HTTP/1.1\nHost: h\n\n")
        await echo.began.wait()
        await client.close()
        for _ in range(100):
            if echo.cancelled:
                break
            await asyncio.sleep(0.002)
        assert echo.cancelled == ["/wait"]
        assert not server.connections


async def test_an_answer_without_its_client_is_told() -> None:
    echo = Echo()
    async with serving(echo) as (server, connect):
        client = await connect()
        client.send("GET /stubborn HTTP/1.1\nHost: h\n\n")
        await echo.began.wait()
        await client.close()
        for _ in range(100):
            if not server.connections:
                break
            await asyncio.sleep(0.002)
        echo.go.set()
        for _ in range(100):
            if echo.undelivered:
                break
            await asyncio.sleep(0.002)
        assert echo.undelivered == 1


async def test_closing_lets_running_calls_finish() -> None:
    echo = Echo()
    async with serving(echo) as (server, connect):
        busy, idle = await connect(), await connect()
        busy.send("GET /wait HTTP/1.1\nHost: h\n\n")
        await echo.began.wait()
        closing = asyncio.create_task(server.close(5.0))
        assert await idle.at_end()
        echo.go.set()
        assert (await busy.read())[0] == 200
        await asyncio.wait_for(closing, 1)
        await busy.close()
        await idle.close()


async def test_closing_does_not_wait_for_ever() -> None:
    echo = Echo()
    async with serving(echo) as (server, connect):
        client = await connect()
        client.send("GET /wait HTTP/1.1\nHost: h\n\n")
        await echo.began.wait()
        await server.close(0.01)
        await asyncio.sleep(0.01)
        assert echo.cancelled == ["/wait"]
        await client.close()


def test_segments_keep_an_encoded_slash() -> None:
    assert segments("/v1/images/a%2Fb%3A1/") == ("v1", "images", "a/b:1")


async def test_a_stream_comes_in_pieces_and_the_connection_goes_on() -> None:
    echo = Echo()
    async with serving(echo) as (_, connect):
        client = await connect()
        client.send("GET /stream HTTP/1.1\nHost: x\n\nGET /next HTTP/1.1\nHost: x\n\n")
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
        assert b"Transfer-Encoding: chunked" in head
        assert await asyncio.wait_for(client.reader.readuntil(b"one \r\n"), 5) == b"4\r\none \r\n"
        assert echo.started == ["/stream"]
        echo.go.set()
        assert await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), 5) == b"3\r\ntwo\r\n0\r\n\r\n"
        assert (await client.read())[2] == b"GET /next? "
        await client.close()


async def test_a_stream_ends_with_its_reader() -> None:
    echo = Echo()
    async with serving(echo) as (_, connect):
        client = await connect()
        client.send("GET /stream HTTP/1.1\nHost: x\n\n")
        await asyncio.wait_for(client.reader.readuntil(b"one \r\n"), 5)
        await client.close()
        await asyncio.wait_for(echo.left.wait(), 5)
        assert echo.cancelled == ["stream"]

"""The HTTP/1.1 server under the control API: httptools on an asyncio protocol.

Own code for two reasons that a general server's interface (ASGI) costs us. A client that goes away has to cancel its call at
once, also in the middle of a create, and an answer that never reached its client has to be undone (`Answer.undelivered`).
And the budget: a create, an exec and a kill three hundred times a second on two cores leave serve 0.7 ms for a create, of
which uvicorn and Starlette alone take half, and a quarter of a second for an embedded server to start, of which importing
them takes a third.

What is bounded: the head (64 KiB), the body (each route says), requests waiting on one connection (reading stops), how long
a request may take to arrive, how many connections there are. Calls bound themselves.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol, cast
from urllib.parse import unquote

import httptools

HEAD_LIMIT_BYTES: Final = 64 * 1024
ARRIVAL_S: Final = 60.0
"""How long a request may take to arrive, from its first byte to its last without a pause of this length."""
IDLE_S: Final = 600.0
"""How long a connection may stay open without a request."""
SWEEP_S: Final = 5.0
MOST_CONNECTIONS: Final = 8192
READING_S: Final = 600.0
"""How long a client of a stream may read nothing of it."""
QUEUED: Final = 4
"""Requests read ahead on one connection."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_STATUS_LINES = {code: b"HTTP/1.1 %d %s\r\n" % (code, phrase) for code, phrase in _REASONS.items()}

log = logging.getLogger("sandmill.http")


class Request:
    """One request, whole."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query")

    def __init__(self, method: str, path: str, query: str, headers: dict[bytes, bytes], keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        """Names in lower case; of a repeated header the last."""
        self.keep_alive = keep_alive
        self.body = b""

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


@dataclass(slots=True)
class Answer:
    """What to send back."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: list[tuple[str, str]] = field(default_factory=list)
    undelivered: Callable[[], None] | None = None
    """Called when the client was gone before the answer could be sent."""
    stream: AsyncGenerator[bytes, None] | None = None
    """Instead of `body`: pieces that are sent as they come. It never raises, and is closed when the client goes away."""


class Application(Protocol):
    """What answers. `answer` never raises (but CancelledError, when the client has gone)."""

    def body_limit(self, method: str, path: str) -> int:
        """Bytes that the body of such a request may have."""
        ...

    def refusal(self, status: int, code: str, message: str) -> Answer:
        """The answer to a request that is no valid one."""
        ...

    def answer(self, request: Request) -> Awaitable[Answer]: ...


class Server:
    """Listens, and ends in order: first no new requests, then the running ones for a while, then none."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self.closing = False
        self._empty = asyncio.Event()
        """Set while there is no connection."""
        self._empty.set()

    def opened(self, connection: "Connection") -> None:
        self.connections.add(connection)
        self._empty.clear()

    def closed(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    async def listen(self, listener: socket.socket) -> int:
        """Answers what comes to a bound socket; returns its port."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), sock=listener)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self, grace_s: float) -> None:
        """Answers what runs, for `grace_s` at most; the rest is cancelled. Idempotent."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.close_when_idle()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        for connection in list(self.connections):
            connection.abort()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.sweep(now)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)


class Connection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other."""

    __slots__ = (
        "_answer",
        "_body",
        "_broken",
        "_drained",
        "_head_bytes",
        "_headers",
        "_last",
        "_limit",
        "_loop",
        "_parser",
        "_queue",
        "_reading_paused",
        "_request",
        "_server",
        "_stopped_writing",
        "_task",
        "_transport",
        "_url",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._queue: deque[Request | Answer] = deque()
        """Requests to answer, and last a refusal where what came next wasn't a valid one."""
        self._task: asyncio.Task[None] | None = None
        self._last = self._loop.time()
        self._stopped_writing = False
        self._drained: asyncio.Event | None = None
        """Of a stream that waits for its reader."""
        self._reading_paused = False
        self._broken = False
        self._request: Request | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._limit = 0
        self._head_bytes = 0

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        if len(self._server.connections) >= MOST_CONNECTIONS or self._server.closing:
            transport.abort()
            return
        self._parser = httptools.HttpRequestParser(self)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.closed(self)
        self._transport = None
        if self._task is not None:
            self._task.cancel()
        self._queue.clear()

    def data_received(self, data: bytes) -> None:
        self._last = self._loop.time()
        if self._broken:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # we have no other protocol: the request itself is answered as usual
        except httptools.HttpParserError as error:
            self._refuse(400, "invalid_request", f"this is no HTTP request that we understand: {error}")
        if self._request is None and self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(431, "request_too_large", f"the request's head is over {HEAD_LIMIT_BYTES} bytes")

    def pause_writing(self) -> None:
        self._stopped_writing = True

    def resume_writing(self) -> None:
        self._stopped_writing = False
        if self._drained is not None:
            self._drained.set()
        self._next()

    # the parser's side

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        path, _, query = self._url.partition(b"?")
        method = self._parser.get_method().decode("ascii")
        request = Request(
            method, path.decode("latin-1"), query.decode("latin-1"), self._headers, self._parser.should_keep_alive()
        )
        self._request = request
        self._limit = self._server.application.body_limit(method, request.path)
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._limit -= len(body)
        if self._limit < 0:
            self._refuse(413, "request_too_large", "the request's body is larger than this call takes")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        self._head_bytes = 0
        if request is None or self._broken:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._queue.append(request)
        if len(self._queue) >= QUEUED and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._next()

    # ours

    def close_when_idle(self) -> None:
        if self._task is None and not self._queue and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        if self._task is not None or self._transport is None:
            return
        arriving = self._request is not None or self._head_bytes > 0
        if now - self._last > (ARRIVAL_S if arriving else IDLE_S):
            self._transport.abort()

    def _refuse(self, status: int, code: str, message: str) -> None:
        if not self._broken:
            self._broken = True
            self._queue.append(self._server.application.refusal(status, code, message))
            self._next()

    def _next(self) -> None:
        """Starts on the next request, unless one runs or the client does not read what it asked for."""
        if self._task is not None or self._stopped_writing or self._transport is None:
            return
        if not self._queue:
            if self._server.closing:
                self._transport.close()
            return
        following = self._queue.popleft()
        if self._reading_paused and len(self._queue) < QUEUED:
            self._reading_paused = False
            self._transport.resume_reading()
        if isinstance(following, Answer):
            self._send(following, keep_alive=False)
        else:
            self._task = self._loop.create_task(self._serve(following))

    async def _serve(self, request: Request) -> None:
        answer = await self._server.application.answer(request)
        if answer.stream is not None:
            await self._stream(answer, answer.stream)
        self._task = None
        if answer.stream is None:
            self._send(answer, request.keep_alive and not self._server.closing)
        elif not request.keep_alive and self._transport is not None:
            self._transport.close()
        self._next()

    async def _stream(self, answer: Answer, pieces: AsyncGenerator[bytes, None]) -> None:
        """A body of unknown length, chunk by chunk. When the client goes away this is cancelled."""
        async with aclosing(pieces):
            self._write(
                b"%sContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
                % (_STATUS_LINES[answer.status], answer.content_type)
            )
            try:
                async for piece in pieces:
                    if piece:
                        self._write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    if self._stopped_writing:
                        self._drained = asyncio.Event()
                        async with asyncio.timeout(READING_S):
                            await self._drained.wait()
                        self._drained = None
            except TimeoutError:
                self.abort()
                return
        self._write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            self._last = self._loop.time()

    def _send(self, answer: Answer, keep_alive: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            if answer.undelivered is not None:
                answer.undelivered()
            return
        line = _STATUS_LINES.get(answer.status) or b"HTTP/1.1 %d Status\r\n" % answer.status
        parts = [line]
        if answer.status != 204:
            parts.append(b"Content-Type: %s\r\nContent-Length: %d\r\n" % (answer.content_type, len(answer.body)))
        parts += [b"%s: %s\r\n" % (name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        if not keep_alive:
            parts.append(b"Connection: close\r\n")
        parts += [b"\r\n", answer.body]
        transport.write(b"".join(parts))
        self._last = self._loop.time()
        if not keep_alive:
            transport.close()


def segments(path: str) -> tuple[str, ...]:
    """The decoded segments of a path; an encoded slash stays inside its segment."""
    parts = path.strip("/").split("/")
    return tuple(unquote(part) if "%" in part else part for part in parts)

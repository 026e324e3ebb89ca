"""One asyncio HTTP connection to a daemon: the asyncio driver of `http1`, twin of `connection`."""

import asyncio
import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterable

from sandmill.errors import TransportError
from sandmill.sdk import http1
from sandmill.sdk.connection import CONNECT_S, RECEIVE_BYTES, Endpoint


async def open_connection(endpoint: Endpoint, wait_s: float = CONNECT_S) -> "AsyncConnection":
    """Connects; a refused connection is tried again for `wait_s`. Raises TransportError (retryable: nothing was sent)."""
    give_up = asyncio.get_running_loop().time() + wait_s
    pause = 0.01
    while True:
        try:
            async with asyncio.timeout_at(give_up):
                return await _connect(endpoint)
        except OSError as error:  # TimeoutError is one
            refused = isinstance(error, (ConnectionRefusedError, ConnectionResetError, FileNotFoundError))
            if not refused or asyncio.get_running_loop().time() + pause > give_up:
                raise TransportError(
                    f"cannot connect to {endpoint.authority}: {error or 'no answer'}",
                    hint="is the server running? `sandmill serve` starts one",
                    retryable=True,
                ) from error
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.25)


async def _connect(endpoint: Endpoint) -> "AsyncConnection":
    if endpoint.scheme == "unix":
        streams = await asyncio.open_unix_connection(endpoint.host)
    else:
        streams = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.scheme == "https" or None)
        sock: socket.socket = streams[1].get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return AsyncConnection(*streams)


class AsyncConnection:
    """A connection that carries one request at a time; cancelling a call closes it, so the server sees its client go."""

    __slots__ = ("_reader", "_writer", "healthy")

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.healthy = True

    def close(self) -> None:
        self.healthy = False
        self._writer.close()

    def is_stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def exchange(self, raw: bytes, wait_s: float | None) -> tuple[http1.Head, bytes]:
        """Sends a whole request and reads the whole answer. Raises TransportError."""
        try:
            async with asyncio.timeout(wait_s):
                self.send(raw)
                reader = await self.read_head()
                while not reader.done:
                    await self._receive(reader)
        except TimeoutError:
            self.close()
            raise TransportError("no answer came in time", code="answer_timeout") from None
        except BaseException:
            self.close()
            raise
        assert reader.head is not None
        self.healthy = not reader.head.close
        return reader.head, bytes(reader.body)

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    async def send_body(self, parts: Iterable[bytes] | AsyncIterable[bytes], chunked: bool) -> None:
        """Sends a body after its head; stops early, without an error, when the server answers before it has all."""
        try:
            if isinstance(parts, AsyncIterable):
                async for part in parts:
                    await self._part(part, chunked)
            else:
                for part in parts:
                    await self._part(part, chunked)
            if chunked:
                self._writer.write(http1.LAST_CHUNK)
                await self._writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            self.healthy = False

    async def _part(self, part: bytes, chunked: bool) -> None:
        if part:
            self._writer.write(http1.chunk(part) if chunked else part)
            await self._writer.drain()

    async def read_head(self) -> http1.Reader:
        reader = http1.Reader()
        while reader.head is None:
            await self._receive(reader)
        return reader

    async def body(self, reader: http1.Reader) -> AsyncIterator[bytes]:
        """The body, piece by piece as it comes."""
        try:
            while True:
                if data := reader.take():
                    yield data
                if reader.done:
                    break
                await self._receive(reader)
        except BaseException:
            self.close()
            raise
        assert reader.head is not None
        self.healthy = self.healthy and not reader.head.close

    async def _receive(self, reader: http1.Reader) -> None:
        try:
            data = await self._reader.read(RECEIVE_BYTES)
            if data:
                reader.feed(data)
            else:
                reader.end_of_stream()
        except OSError as error:
            raise TransportError(f"the connection broke: {error}") from error
        except http1.ProtocolError as error:
            raise TransportError(str(error)) from error

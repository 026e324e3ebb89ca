"""A minimal HTTP/1.1 client core without I/O: what to send, and a parser that is fed what arrives.

Own code on purpose: an exec's budget over a spawn is a third of a millisecond, and a general client (httpx, urllib3, even
http.client) costs that much or more by itself. It speaks just what Sandmill's daemons answer: Content-Length, chunked and
empty bodies, 101. One request at a time on a connection; a server that says `Connection: close` is obeyed.
"""

from typing import Final

import msgspec

MAX_HEAD_BYTES: Final = 64 * 1024

_NO_BODY = frozenset({204, 304})


class ProtocolError(Exception):
    """What arrived isn't HTTP as we speak it."""


def request(method: str, target: str, headers: bytes, body: bytes | None) -> bytes:
    """A whole request. `headers` are complete lines, each ended by CRLF."""
    if body is None:
        return b"%s %s HTTP/1.1\r\n%s\r\n" % (method.encode(), target.encode(), headers)
    return b"%s %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (
        method.encode(),
        target.encode(),
        headers,
        len(body),
        body,
    )


def head(method: str, target: str, headers: bytes, length: int | None) -> bytes:
    """The head of a request whose body follows: of known length, or chunked (None)."""
    framing = b"Transfer-Encoding: chunked\r\n" if length is None else b"Content-Length: %d\r\n" % length
    return b"%s %s HTTP/1.1\r\n%s%s\r\n" % (method.encode(), target.encode(), headers, framing)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"


class Head(msgspec.Struct):
    """Status line and headers of an answer; header names in lower case."""

    status: int
    headers: dict[bytes, bytes] = {}

    @property
    def close(self) -> bool:
        return b"close" in self.headers.get(b"connection", b"").lower()

    @property
    def content_type(self) -> str:
        return self.headers.get(b"content-type", b"").decode("latin-1")


def parse_head(raw: bytes) -> Head:
    """Parses everything before the empty line."""
    lines = raw.split(b"\r\n")
    parts = lines[0].split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ProtocolError(f"not an HTTP answer: {lines[0][:80]!r}")
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ProtocolError(f"not a header: {line[:80]!r}")
        headers[name.lower()] = value.strip()
    return Head(int(parts[1]), headers)


class Reader:
    """Parses one answer from bytes as they come: `feed`, then look at `head`, take from `body`, until `done`."""

    __slots__ = ("_buffer", "_left", "_mode", "body", "done", "head")

    def __init__(self, rest: bytes = b"") -> None:
        self.head: Head | None = None
        self.body = bytearray()
        self.done = False
        self._buffer = bytearray(rest)
        self._mode = "head"
        self._left = 0
        if rest:
            self._advance()

    def feed(self, data: bytes) -> None:
        """Takes what arrived. Raises ProtocolError."""
        self._buffer += data
        self._advance()

    def end_of_stream(self) -> None:
        """The server closed. Raises ProtocolError unless that is how this answer ends."""
        if self._mode == "until_close":
            self.done = True
        elif not self.done:
            raise ProtocolError("the server closed the connection in the middle of its answer")

    @property
    def rest(self) -> bytes:
        """Bytes after the answer (after a 101 they belong to the upgraded connection)."""
        return bytes(self._buffer)

    def take(self) -> bytes:
        """The body as far as it has come, once."""
        data = bytes(self.body)
        self.body.clear()
        return data

    def _advance(self) -> None:
        if self._mode == "head" and not self._parse_head():
            return
        if self._mode == "length":
            data = self._buffer[: self._left]
            self.body += data
            del self._buffer[: len(data)]
            self._left -= len(data)
            self.done = self._left == 0
        elif self._mode == "chunked":
            self._chunks()
        elif self._mode == "until_close":
            self.body += self._buffer
            self._buffer.clear()

    def _parse_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ProtocolError("the answer's head is too long")
                return False
            found = parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            if found.status >= 200 or found.status == 101:
                break  # other 1xx answers announce the real one
        self.head = found
        if found.status == 101 or found.status in _NO_BODY:
            self._mode, self.done = "none", True
        elif b"chunked" in found.headers.get(b"transfer-encoding", b"").lower():
            self._mode = "chunked"
        elif (length := found.headers.get(b"content-length")) is not None:
            if not length.isdigit():
                raise ProtocolError(f"not a length: {length[:40]!r}")
            self._mode, self._left = "length", int(length)
            self.done = self._left == 0
        else:
            self._mode = "until_close"
        return True

    def _chunks(self) -> None:
        while not self.done:
            if self._left > 0:  # inside a chunk; its two closing bytes count
                data = self._buffer[: self._left]
                del self._buffer[: len(data)]
                payload = min(len(data), max(0, self._left - 2))
                self.body += data[:payload]
                self._left -= len(data)
                if self._left > 0:
                    return
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return
            size = bytes(self._buffer[:end]).split(b";")[0].strip()
            try:
                count = int(size, 16)
            except ValueError:
                raise ProtocolError(f"not a chunk size: {size[:40]!r}") from None
            if count == 0:
                if (trailer := self._buffer.find(b"\r\n\r\n", end)) < 0:
                    return
                del self._buffer[: trailer + 4]
                self.done = True
                return
            del self._buffer[: end + 2]
            self._left = count + 2

"""One blocking HTTP connection to a daemon, over TCP, TLS or a unix socket: the socket driver of `http1`."""

import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit

import msgspec

from sandmill.errors import TransportError, UsageError
from sandmill.sdk import http1

CONNECT_S = 5.0
"""How long a connect is tried; a daemon that is being restarted comes back within it."""
TICK_S = 1.0
"""How often a blocked read looks at its deadline."""
RECEIVE_BYTES = 256 * 1024


class Endpoint(msgspec.Struct, frozen=True):
    """Where a daemon listens: `http://host:port`, `https://host:port` or `unix:/path`."""

    scheme: str
    host: str
    port: int

    @staticmethod
    def parse(url: str) -> "Endpoint":
        """Raises UsageError for a URL that isn't one of the three."""
        if url.startswith("unix:"):
            return Endpoint("unix", url.removeprefix("unix:"), 0)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no server address", hint="it looks like http://127.0.0.1:3000")
        return Endpoint(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))

    @property
    def authority(self) -> str:
        return "localhost" if self.scheme == "unix" else f"{self.host}:{self.port}"


def open_socket(endpoint: Endpoint, deadline: float) -> socket.socket:
    """Connects; a refused connection is tried again until the deadline or CONNECT_S, whichever is first.

    Raises TransportError (retryable: nothing was sent).
    """
    give_up = min(deadline, time.monotonic() + CONNECT_S)
    pause = 0.01
    while True:
        try:
            return connect(endpoint, max(0.05, give_up - time.monotonic()))
        except OSError as error:
            refused = isinstance(error, (ConnectionRefusedError, ConnectionResetError, FileNotFoundError))
            if not refused or time.monotonic() + pause > give_up:
                raise TransportError(
                    f"cannot connect to {endpoint.authority}: {error}",
                    hint="is the server running? `sandmill serve` starts one",
                    retryable=True,
                ) from error
        time.sleep(pause)
        pause = min(pause * 2, 0.25)


def connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    """One try. Raises OSError."""
    if endpoint.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(endpoint.host)
    else:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if endpoint.scheme == "https":
            import ssl

            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=endpoint.host)
    sock.settimeout(None)
    # A blocking socket with a kernel timeout: Python's own timeouts would add a poll to every read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6)))
    return sock


class Connection:
    """A connection that carries one request at a time.

    `healthy` turns false once it can't carry another. Not thread-safe: whoever takes it from a pool owns it.
    """

    __slots__ = ("_sock", "_tls", "healthy", "sent")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = hasattr(sock, "cipher")  # without an import of ssl, which costs more than all of this package
        self.healthy = True
        self.sent = False
        """Whether bytes of the last request may have reached the server."""

    def close(self) -> None:
        self.healthy = False
        self._sock.close()

    def is_stale(self) -> bool:
        """Whether the server has closed the idle connection."""
        if self._tls:  # the kernel's bytes are records: any that come unasked are an end, or worth a new connection
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            return bool(poller.poll(0))
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # an end of file, or bytes that nobody asked for

    def exchange(
        self, raw: bytes, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> tuple[http1.Head, bytes]:
        """Sends a whole request and reads the whole answer; does something of use while the server works.

        Raises TransportError; the connection is closed then, also on KeyboardInterrupt (the server sees its client go).
        """
        try:
            self.send(raw)
            if meanwhile is not None:
                meanwhile()
            reader = self.read_head(deadline)
            while not reader.done:
                self._receive(reader, deadline)
        except BaseException:
            self.close()
            raise
        assert reader.head is not None
        self.healthy = not reader.head.close
        return reader.head, bytes(reader.body)

    def send(self, raw: bytes) -> None:
        self.sent = False
        try:
            self._sock.sendall(raw)
        except OSError as error:
            raise self._broken(error) from error
        finally:
            self.sent = True

    def send_body(self, parts: Iterable[bytes], chunked: bool) -> None:
        """Sends a body after its head. A server that answers before it has all makes this stop early, without an error:
        read the answer then."""
        try:
            for part in parts:
                if part:
                    self._sock.sendall(http1.chunk(part) if chunked else part)
            if chunked:
                self._sock.sendall(http1.LAST_CHUNK)
        except (BrokenPipeError, ConnectionResetError):
            self.healthy = False
        except OSError as error:
            raise self._broken(error) from error

    def read_head(self, deadline: float) -> http1.Reader:
        reader = http1.Reader()
        while reader.head is None:
            self._receive(reader, deadline)
        return reader

    def body(self, reader: http1.Reader, idle_s: float) -> Iterator[bytes]:
        """The body, piece by piece as it comes; a silence longer than `idle_s` raises TransportError."""
        try:
            while True:
                if data := reader.take():
                    yield data
                if reader.done:
                    break
                self._receive(reader, time.monotonic() + idle_s)
        except BaseException:
            self.close()
            raise
        assert reader.head is not None
        self.healthy = self.healthy and not reader.head.close

    def _receive(self, reader: http1.Reader, deadline: float) -> None:
        while True:
            try:
                data = self._receive_tls() if self._tls else self._sock.recv(RECEIVE_BYTES)
                break
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > deadline:
                    raise TransportError("no answer came in time", code="answer_timeout") from None
            except OSError as error:
                raise self._broken(error) from error
        try:
            if data:
                reader.feed(data)
            else:
                reader.end_of_stream()
        except http1.ProtocolError as error:
            raise TransportError(str(error)) from error

    def _receive_tls(self) -> bytes:
        """Raises TimeoutError. OpenSSL goes on after the kernel's timeout, so the time is Python's to keep."""
        self._sock.settimeout(TICK_S)
        try:
            return self._sock.recv(RECEIVE_BYTES)
        finally:
            self._sock.settimeout(None)

    @staticmethod
    def _broken(error: OSError) -> TransportError:
        return TransportError(f"the connection broke: {error}")


class Dial:
    """Opens a connection to where one will probably be needed; called while there is nothing else to do."""

    __slots__ = ("_connection", "_url")

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None

    def __call__(self) -> None:
        if self._url and self._connection is None:
            try:
                self._connection = Connection(connect(Endpoint.parse(self._url), CONNECT_S))
            except OSError:
                pass  # who needs it tries again, and says what is wrong

    def to(self, url: str) -> Connection | None:
        """The connection, if it leads to `url`."""
        if self._url != url:
            self.close()
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

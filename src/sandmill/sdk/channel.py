"""The data path of one sandbox: a few connections to its sandboxd, attached through the gateway."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from sandmill.errors import SandmillError, TransportError
from sandmill.sdk import calls, http1
from sandmill.sdk.connection import Connection, Endpoint, open_socket

T = TypeVar("T")

ANSWER_S = 60.0
"""How long an answer may take beyond what the call itself may take."""
FOREVER_S = 10.0 * 365 * 86400
MOST_IDLE = 16
ASK_AGAIN_S = (0.02, 0.08, 0.3, 0.6)
"""A connection breaks a moment before the node notices why; how long to wait before it is asked again, each time."""


def attach_request(endpoint: Endpoint, sandbox_id: str, token: str) -> bytes:
    """What asks the gateway to hand the connection over to the sandbox."""
    headers = (
        f"Host: {endpoint.authority}\r\nE2b-Sandbox-Id: {sandbox_id}\r\nX-Access-Token: {token}\r\n"
        "Connection: Upgrade\r\nUpgrade: sandmill\r\n"
    )
    return http1.request("GET", calls.PREFIX + "attach", headers.encode(), None)


def _close_all(*pools: deque[Connection]) -> None:
    for pool in pools:
        while pool:
            pool.pop().close()


class Channel:
    """Thread-safe: each call takes an idle connection, or opens one.

    `why_gone` is asked when a connection breaks: it gives the typed end of the sandbox if that is the reason. `opened` is a
    fresh connection to the gateway, if there is one already.
    """

    def __init__(
        self,
        url: str,
        sandbox_id: str,
        token: str,
        why_gone: Callable[[], SandmillError | None],
        opened: Connection | None = None,
    ) -> None:
        self._endpoint = Endpoint.parse(url)
        self._attach = attach_request(self._endpoint, sandbox_id, token)
        self._idle: deque[Connection] = deque()
        self._opened: deque[Connection] = deque() if opened is None else deque([opened])
        """Open and not attached yet."""
        weakref.finalize(self, _close_all, self._idle, self._opened).atexit = False
        self._why_gone = why_gone
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            _close_all(self._idle, self._opened)

    def call(self, call: calls.Call[T], wait_s: float | None = None) -> T:
        """One call. `wait_s` is what it may take by itself; None: as long as it likes.

        Raises the typed error of the answer; SandboxGoneError with its cause; TransportError when the connection broke
        and the sandbox is not known to be gone. A call is sent again only if it is idempotent.
        """
        deadline = time.monotonic() + (FOREVER_S if wait_s is None else wait_s + ANSWER_S)
        while True:
            connection = self._take(deadline)
            try:
                head, body = connection.exchange(call.raw, deadline)
            except TransportError as error:
                if call.idempotent and error.code != "answer_timeout" and self._why_gone() is None:
                    call = msgspec.structs.replace(call, idempotent=False)  # once
                    continue
                raise self._explain(error) from error
            self._give(connection)
            return calls.answer(call, head, body)

    @contextmanager
    def stream(self, raw: bytes, idle_s: float = FOREVER_S) -> Iterator[tuple[http1.Head, Iterator[bytes]]]:
        """A call whose answer is a stream: its head and its pieces. Leaving the block early closes the connection."""
        deadline = time.monotonic() + ANSWER_S
        connection = self._take(deadline)
        try:
            connection.send(raw)
            reader = connection.read_head(deadline)
            assert reader.head is not None
            if reader.head.status >= 300:
                raise calls.error_of(reader.head, b"".join(connection.body(reader, ANSWER_S)))
            yield reader.head, connection.body(reader, idle_s)
            if not reader.done:
                connection.close()
        except TransportError as error:
            connection.close()
            raise self._explain(error) from error
        except BaseException:
            connection.close()
            raise
        self._give(connection)

    def upload(self, target: str, parts: Iterable[bytes], length: int | None) -> tuple[http1.Head, bytes]:
        """A call whose request is a stream. Raises what `call` raises."""
        deadline = time.monotonic() + FOREVER_S
        connection = self._take(time.monotonic() + ANSWER_S)
        try:
            connection.send(http1.head("PUT", target, calls.RAW, length))
            connection.send_body(parts, chunked=length is None)
            reader = connection.read_head(deadline)
            body = b"".join(connection.body(reader, ANSWER_S))
        except TransportError as error:
            connection.close()
            raise self._explain(error) from error
        except BaseException:
            connection.close()  # the server drops the half-written file
            raise
        assert reader.head is not None
        self._give(connection)
        if reader.head.status >= 300:
            raise calls.error_of(reader.head, body)
        return reader.head, body

    def _take(self, deadline: float) -> Connection:
        if self._process != os.getpid():  # a forked child: the connections are its parent's
            self._process = os.getpid()
            _close_all(self._idle, self._opened)
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not connection.is_stale():
                return connection
            connection.close()
        if self._closed:
            raise TransportError("this Sandbox object is closed", code="closed")
        connection = self._open(deadline)
        try:
            connection.send(self._attach)
            reader = connection.read_head(deadline)
            assert reader.head is not None
            if reader.head.status != 101:
                error = calls.error_of(reader.head, b"".join(connection.body(reader, ANSWER_S)))
                raise self._why_gone() or error
        except TransportError as error:
            connection.close()
            error.retryable = True  # nothing of the caller's was sent
            raise self._explain(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self, deadline: float) -> Connection:
        try:
            connection = self._opened.pop()
        except IndexError:
            return Connection(open_socket(self._endpoint, deadline))
        if not connection.is_stale():
            return connection
        connection.close()
        return self._open(deadline)

    def _give(self, connection: Connection) -> None:
        if connection.healthy and not self._closed and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def _explain(self, error: TransportError) -> SandmillError:
        if error.code in ("answer_timeout", "closed"):
            return error
        for pause in ASK_AGAIN_S:
            if (gone := self._why_gone()) is not None:
                return gone
            time.sleep(pause)
        return self._why_gone() or error

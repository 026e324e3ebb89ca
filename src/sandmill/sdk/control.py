"""The control API (`/v1`), for the blocking client."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from sandmill.errors import (
    ConflictError,
    ImageError,
    NotFoundError,
    SandboxGoneError,
    SandmillError,
    ServerError,
    TransportError,
    from_wire,
)
from sandmill.sdk import calls, http1
from sandmill.sdk.configuration import Server
from sandmill.sdk.connection import Connection, Endpoint, open_socket
from sandmill.wire import Collected, Collection, CreateSandbox, ImageInfo, Pulling, SandboxView, Usage

T = TypeVar("T")

CREATE_S = 120.0
CALL_S = 60.0
LONG_S = 3600.0
RETRY_S = 10.0
"""How long an idempotent call is tried again while the server can't be reached (it may be restarting)."""

Views = list[SandboxView]
Names = list[str]
Infos = list[ImageInfo]
Pullings = list[Pulling]
_encode = msgspec.json.Encoder().encode


class Page(msgspec.Struct):
    sandboxes: list[SandboxView]
    next_cursor: str | None = None


class Images(msgspec.Struct):
    images: list[ImageInfo]


class Pulls(msgspec.Struct):
    pulls: list[Pulling]


class Gone(msgspec.Struct):
    gone: list[str]


class Prepared(msgspec.Struct):
    """An environment: `image` is what sandboxes are made from."""

    image: str
    cached: bool = False
    prepare_s: float = 0.0
    log: str = ""


class Said(msgspec.Struct):
    """A line of a preparation that is followed: exactly one of the three."""

    output: bytes = b""
    prepared: Prepared | None = None
    error: dict[str, Any] | None = None
    status: int = 422


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ServerError(f"the server's answer can't be read: {error}") from error


class Control:
    """Thread-safe client of one server. Every call has a deadline; idempotent calls survive a restart of the server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._endpoint = Endpoint.parse(server.api_url)
        self._headers = (
            f"Host: {self._endpoint.authority}\r\nX-API-Key: {server.api_key}\r\nContent-Type: application/json\r\n"
        ).encode()
        self._idle: deque[Connection] = deque()
        self.data_url = ""
        """Where the gateway was last; empty before the first create."""

    def create(self, spec: CreateSandbox, key: str, meanwhile: Callable[[], None] | None = None) -> SandboxView:
        """Creates once, however often it has to be sent (`key` is the idempotency key). `meanwhile` is called while the server
        is at work."""
        extra = f"Idempotency-Key: {key}\r\n".encode()
        # An image may have to come from its registry first.
        limit_s = CREATE_S if spec.image == "host" or spec.pull == "never" else LONG_S
        answer = self._call("POST", "/v1/sandboxes", _encode(spec), limit_s, extra, meanwhile=meanwhile)
        view = decode(answer, SandboxView)
        self.data_url = view.data_url
        return view

    def get(self, sandbox_id: str) -> SandboxView:
        return decode(self._call("GET", f"/v1/sandboxes/{quote(sandbox_id, safe='')}", None), SandboxView)

    def list(self, metadata: dict[str, str] | None = None) -> Views:
        filters = {f"metadata.{name}": value for name, value in (metadata or {}).items()}
        found: Views = []
        cursor = None
        while True:
            query = calls.query(limit=500, cursor=cursor, **filters)
            page = decode(self._call("GET", f"/v1/sandboxes?{query}", None), Page)
            found += page.sandboxes
            cursor = page.next_cursor
            if cursor is None:
                return found

    def kill(self, sandbox_id: str) -> bool:
        """Whether it was there to be killed."""
        try:
            self._call("DELETE", f"/v1/sandboxes/{quote(sandbox_id, safe='')}", None)
        except (NotFoundError, SandboxGoneError):
            return False
        return True

    def renew(self, sandbox_id: str, ttl_s: float) -> None:
        self._call("POST", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/lease", _encode({"ttl_s": ttl_s}))

    def renew_many(self, leases: dict[str, float]) -> Names:
        """Ids of those that are gone."""
        return decode(self._call("POST", "/v1/leases", _encode({"renew": leases})), Gone).gone

    def usage(self, sandbox_id: str) -> Usage:
        return decode(self._call("GET", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/usage", None), Usage)

    def commit(self, sandbox_id: str, name: str | None) -> ImageInfo:
        path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}/commit"
        return decode(self._call("POST", path, _encode({"name": name}), LONG_S, again=False), ImageInfo)

    def images(self) -> Infos:
        return decode(self._call("GET", "/v1/images", None), Images).images

    def image(self, name: str) -> ImageInfo:
        return decode(self._call("GET", f"/v1/images/{quote(name, safe='')}", None), ImageInfo)

    def import_image(self, path: str, name: str | None, kind: str = "auto") -> ImageInfo:
        body = _encode({"path": path, "name": name, "format": kind})
        return decode(self._call("POST", "/v1/images/import", body, LONG_S), ImageInfo)

    def pull_image(self, name: str, *, newest: bool = False, credentials: dict[str, str] | None = None) -> ImageInfo:
        """Fetches an image from its registry; `newest` asks the registry also when the image is here."""
        body = _encode({"name": name, "newest": newest, "credentials": credentials})
        return decode(self._call("POST", "/v1/images/pull", body, LONG_S), ImageInfo)

    def pulls(self) -> Pullings:
        return decode(self._call("GET", "/v1/pulls", None), Pulls).pulls

    def collect_images(self, collection: Collection) -> Collected:
        return decode(self._call("POST", "/v1/images/gc", _encode(collection), LONG_S), Collected)

    def remove_image(self, name: str) -> None:
        self._call("DELETE", f"/v1/images/{quote(name, safe='')}", None)

    def prepare(self, body: dict[str, Any]) -> Prepared:
        """Prepares an environment; raises PreparationError with the failed step and its output."""
        return decode(self._call("POST", "/v1/environments", _encode(body), LONG_S), Prepared)

    def prepare_live(self, body: dict[str, Any], listener: Callable[[bytes], object]) -> Prepared:
        """As `prepare`; what the steps write is handed over as it comes, and nothing every two seconds while they are silent.
        What the listener raises ends it. After a broken connection the output comes from its beginning."""
        raw = http1.request("POST", "/v1/environments", self._headers, _encode(body | {"stream": True}))
        give_up = time.monotonic() + RETRY_S
        while True:
            began = time.monotonic()
            try:
                return self._follow(raw, listener)
            except TransportError as error:
                now = time.monotonic()
                if now - began > RETRY_S:  # it was under way: this is another interruption
                    give_up = now + RETRY_S
                if error.code == "answer_timeout" or now > give_up:
                    raise
            time.sleep(1.0)

    def _follow(self, raw: bytes, listener: Callable[[bytes], object]) -> Prepared:
        connection = Connection(open_socket(self._endpoint, time.monotonic() + CALL_S))
        try:
            connection.send(raw)
            reader = connection.read_head(time.monotonic() + CALL_S)
            assert reader.head is not None
            rest = b""
            for part in connection.body(reader, CALL_S):
                rest += part
                if reader.head.status >= 300:
                    continue
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    said = decode(line, Said)
                    if said.error is not None:
                        raise from_wire(said.error, said.status)
                    if said.prepared is not None:
                        return said.prepared
                    listener(said.output)
            if reader.head.status >= 300:
                raise calls.error_of(reader.head, rest)
            raise TransportError("the server ended its answer before the environment was ready")
        finally:
            connection.close()

    def document(self, path: str) -> Any:
        """A JSON document, such as `/v1/doctor`."""
        return json.loads(self._call("GET", path, None))

    def why_gone(self, sandbox_id: str) -> SandmillError | None:
        """The typed end of a sandbox; None if it lives or nothing is known."""
        try:
            self.get(sandbox_id)
        except (SandboxGoneError, NotFoundError) as error:
            return error
        except SandmillError:
            return None
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        wait_s: float = CALL_S,
        extra: bytes = b"",
        *,
        again: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> bytes:
        raw = http1.request(method, path, self._headers + extra, body)
        give_up = time.monotonic() + RETRY_S
        pause = 0.02
        while True:
            try:
                head, answer = self._exchange(raw, time.monotonic() + wait_s, meanwhile)
                if head.status < 300:
                    return answer
                error: SandmillError = calls.error_of(head, answer)
            except TransportError as broken:
                error = broken
            # All calls here may be sent twice (creates carry their key) but for those that say no.
            may = error.retryable or (again and isinstance(error, TransportError) and error.code != "answer_timeout")
            # What is in use stays so for longer than we wait, and a registry was asked again by the server already.
            if not may or isinstance(error, (ConflictError, ImageError)) or time.monotonic() + pause > give_up:
                raise error
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _exchange(self, raw: bytes, deadline: float, meanwhile: Callable[[], None] | None) -> tuple[http1.Head, bytes]:
        connection = None
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not connection.is_stale():
                break
            connection.close()
            connection = None
        if connection is None:
            connection = Connection(open_socket(self._endpoint, deadline))
        head, body = connection.exchange(raw, deadline, meanwhile)
        if connection.healthy and len(self._idle) < 32:
            self._idle.append(connection)
        else:
            connection.close()
        return head, body


_controls: dict[Server, Control] = {}
_lock = threading.Lock()


def control_of(server: Server) -> Control:
    """One client a server and process, shared."""
    with _lock:
        if server not in _controls:
            _controls[server] = Control(server)
        return _controls[server]


def _after_fork() -> None:
    """In a child: the lock is new, and the connections are the parent's."""
    global _lock
    _lock = threading.Lock()
    for control in _controls.values():
        control.close()


os.register_at_fork(after_in_child=_after_fork)


def close_all() -> None:
    """Closes the idle connections of every client of this process; the next call opens new ones."""
    with _lock:
        for control in _controls.values():
            control.close()

"""The data path against a server that misbehaves: what is sent again, what never is, and what the caller hears."""

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trustme

from sandmill.errors import SandboxGoneError, SandmillError, TransportError, UsageError
from sandmill.sdk import calls
from sandmill.sdk.channel import Channel
from sandmill.wire import Exec

ATTACHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: sandmill\r\n\r\n"


def packed(value: object, status: bytes = b"200 OK") -> bytes:
    body = msgspec.msgpack.encode(value)
    return b"HTTP/1.1 %s\r\nContent-Type: application/msgpack\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


RESULT = packed({"pid": 1, "exit_code": 0, "stdout": b"hi"})


class Script:
    """A server: each connection is attached, then answers each request with the next of `answers`; None closes."""

    def __init__(self, answers: list[bytes | None], tls: ssl.SSLContext | None = None) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        if tls:
            self._listener = tls.wrap_socket(self._listener, server_side=True)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            self._request(sock)
            sock.sendall(ATTACHED)
            while raw := self._request(sock):
                self.requests.append(raw)
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    return
                sock.sendall(answer)

    @staticmethod
    def _request(sock: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part:
                return b""
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0
        )
        while len(body) < length:
            body += sock.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._listener.close()


@contextmanager
def channel(
    answers: list[bytes | None],
    gone: Callable[[], SandmillError | None] = lambda: None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[tuple[Channel, Script]]:
    script = Script(answers, tls)
    made = Channel(script.url, "i0", "token", gone)
    try:
        yield made, script
    finally:
        made.close()
        script.close()


EXEC = calls.exec_(Exec(argv=["true"]))


def test_a_connection_is_used_again() -> None:
    with channel([RESULT, RESULT]) as (made, script):
        assert made.call(EXEC).stdout == b"hi"
        assert made.call(EXEC).exit_code == 0
        assert script.connections == 1


def test_a_command_is_never_sent_twice() -> None:
    with channel([None, RESULT]) as (made, script):
        with pytest.raises(TransportError):
            made.call(EXEC)
        assert len(script.requests) == 1


def test_a_question_is_asked_again_once() -> None:
    with channel([None, packed({"procs": []})]) as (made, script):
        assert made.call(calls.procs()).procs == []
        assert len(script.requests) == 2


def test_a_dead_idle_connection_is_not_used() -> None:
    with channel([RESULT, RESULT]) as (made, script):
        made.call(EXEC)
        # The server closes the idle connection: the next call opens another, and nothing is lost.
        for connection in made._idle:
            connection._sock.shutdown(socket.SHUT_RDWR)
        assert made.call(EXEC).exit_code == 0
        assert script.connections == 2


def test_over_tls_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with channel([RESULT, RESULT, None, RESULT], tls=tls) as (made, script):
        for _ in range(2):
            assert made.call(EXEC).stdout == b"hi"
        assert script.connections == 1
        (idle,) = made._idle
        with pytest.raises(TransportError, match="in time"):
            idle.read_head(0.0)  # silence over TLS is a silence, not a broken connection


def test_a_forked_child_opens_its_own_connections() -> None:
    with channel([RESULT, RESULT, RESULT]) as (made, script):
        made.call(EXEC)
        child = os.fork()
        if child == 0:
            os._exit(0 if made.call(EXEC).exit_code == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert script.connections == 2
        assert made.call(EXEC).exit_code == 0
        assert script.connections == 2, "the parent's goes on"


def test_a_broken_connection_tells_the_end_of_the_sandbox() -> None:
    end = SandboxGoneError("it ended: oom", details={"cause": "oom"})
    with channel([None], lambda: end) as (made, _), pytest.raises(SandboxGoneError) as caught:
        made.call(EXEC)
    assert caught.value.cause == "oom"


def test_a_half_answer_is_an_error() -> None:
    with channel([RESULT[:-3], None]) as (made, _):
        connection = made._take(float("inf"))
        connection.send(EXEC.raw)
        reader = connection.read_head(float("inf"))
        connection.send(EXEC.raw)  # makes the server close within its first answer
        with pytest.raises(TransportError, match="middle"):
            b"".join(connection.body(reader, 5.0))


def test_an_error_is_typed() -> None:
    shape = {
        "code": "cwd_not_found",
        "message": "there is no /nope",
        "hint": "make it",
        "retryable": False,
        "details": {},
    }
    with channel([packed(shape, b"400 Bad Request")]) as (made, _), pytest.raises(UsageError) as caught:
        made.call(EXEC)
    assert (caught.value.code, caught.value.hint) == ("cwd_not_found", "make it")


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    made = Channel(url, "i0", "token", lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandmill.sdk.connection.CONNECT_S", 0.05)
        with pytest.raises(TransportError) as caught:
            made.call(EXEC)
    assert caught.value.retryable


def test_frames_in_any_pieces() -> None:
    frames = [{"t": "o", "off": 0, "d": b"abc"}, {"t": "end", "r": {"pid": 1}}]
    raw = b"".join(len(x := msgspec.msgpack.encode(f)).to_bytes(4, "big") + x for f in frames)
    for size in (1, 2, 5, len(raw)):
        parser = calls.Frames()
        found = [frame for i in range(0, len(raw), size) for frame in parser.feed(raw[i : i + size])]
        assert found == frames

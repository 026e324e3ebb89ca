"""sandboxd's calls as data: what to send and how to read the answer. The blocking and the asyncio client share it."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from sandmill.errors import SandmillError, ServerError, TransportError, UsageError, from_wire
from sandmill.sdk import http1
from sandmill.wire import Exec, ProcInfo, Result

T = TypeVar("T")

HEADERS = b"Host: sandbox\r\nContent-Type: application/msgpack\r\nAccept: application/msgpack\r\n"
RAW = b"Host: sandbox\r\nContent-Type: application/octet-stream\r\nAccept: application/msgpack\r\n"
PREFIX = "/sandmill/v1/"

encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(data: bytes, kind: type[T], hook: Callable[[type, Any], Any] | None = None) -> T:
    """Raises ServerError for bytes that aren't what the contract says."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=hook)
    try:
        decoded: T = decoder.decode(data)
        return decoded
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ServerError(f"sandboxd's answer can't be read: {error}") from error


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One request and the type of its answer."""

    raw: bytes
    kind: type[T]
    idempotent: bool = False
    """Whether it may be sent again when it is unknown if the first arrived. A command never is."""
    hook: Callable[[type, Any], Any] | None = None
    """msgspec's dec_hook for the answer's own types."""


def error_of(head: http1.Head, body: bytes) -> SandmillError:
    """The typed error in an answer that says no."""
    shape: Any = None
    try:
        shape = msgspec.msgpack.decode(body) if "msgpack" in head.content_type else json.loads(body or b"null")
    except (ValueError, msgspec.DecodeError):
        pass
    if isinstance(shape, dict):
        return from_wire(shape, head.status)
    text = body[:300].decode(errors="replace")
    return TransportError(f"unexpected answer {head.status}: {text}", status=head.status)


def answer(call: Call[T], head: http1.Head, body: bytes) -> T:
    """Reads an answer; raises the typed error in it."""
    if head.status >= 300:
        raise error_of(head, body)
    if call.kind is type(None):
        return None  # type: ignore[return-value,unused-ignore]
    return decode(body, call.kind, call.hook)


def post(
    path: str,
    body: object,
    kind: type[T],
    *,
    idempotent: bool = False,
    hook: Callable[[type, Any], Any] | None = None,
) -> Call[T]:
    return Call(http1.request("POST", PREFIX + path, HEADERS, encode(body)), kind, idempotent, hook)


def get(path: str, kind: type[T]) -> Call[T]:
    return Call(http1.request("GET", PREFIX + path, HEADERS, None), kind, True)


def delete(path: str, kind: type[T]) -> Call[T]:
    return Call(http1.request("DELETE", PREFIX + path, HEADERS, None), kind, True)


def command(
    what: str | Sequence[str],
    *,
    cwd: str | None,
    env: dict[str, str] | None,
    user: str | None,
    stdin: bytes | str | None,
    timeout_s: float | None,
    output_limit_bytes: int | None,
) -> Exec:
    """A command from the arguments of `run`. Raises UsageError for what can't be one."""
    if timeout_s is not None and timeout_s < 0:
        raise UsageError(f"timeout_s is {timeout_s}", hint="leave it out (or 0) for no timeout")
    if isinstance(stdin, str):
        stdin = stdin.encode()
    if isinstance(what, str):
        argv, shell = None, what
    else:
        argv, shell = list(what), None
        if not argv:
            raise UsageError("an empty command", hint="give a shell line, or a list with the program and its arguments")
    return Exec(
        argv=argv,
        shell=shell,
        cwd=cwd,
        env=env,
        user=user,
        stdin=stdin,
        timeout_s=timeout_s or None,
        output_limit_bytes=output_limit_bytes,
    )


class Started(msgspec.Struct):
    pid: int


class SessionStarted(msgspec.Struct):
    session_id: str
    pid: int


class ProcList(msgspec.Struct):
    procs: list[ProcInfo]


def exec_(spec: Exec) -> Call[Result]:
    return post("exec", spec, Result)


def start(
    spec: Exec, *, pty: tuple[int, int] | None, tag: str | None, keep_stdin: bool, paced: bool = False
) -> Call[Started]:
    """`pty` is (rows, columns). `paced`: it waits for the (paced) reader of its output."""
    body = msgspec.to_builtins(spec, builtin_types=(bytes,)) | {"keep_stdin": keep_stdin, "tag": tag}
    if paced:
        body["paced"] = True
    if pty is not None:
        body["pty"] = {"rows": pty[0], "cols": pty[1]}
    return post("procs", body, Started)


def procs() -> Call[ProcList]:
    return get("procs", ProcList)


def signal(pid: int, number: int, tree: bool) -> Call[None]:
    return post(f"procs/{pid}/signal", {"signal": number, "tree": tree}, type(None))


def resize(pid: int, rows: int, cols: int) -> Call[None]:
    return post(f"procs/{pid}/resize", {"rows": rows, "cols": cols}, type(None), idempotent=True)


def wait(pid: int, timeout_s: float | None) -> Call[Result]:
    return post(f"procs/{pid}/wait", {"timeout_s": timeout_s}, Result, idempotent=True)


def kill(pid: int) -> Call[Result]:
    return delete(f"procs/{pid}", Result)


def stdin(pid: int, data: bytes, eof: bool) -> Call[None]:
    return Call(http1.request("POST", f"{PREFIX}procs/{pid}/stdin?eof={int(eof)}", RAW, data), type(None))


def output(pid: int, stdout_offset: int, stderr_offset: int, paced: bool = False) -> bytes:
    where = f"stdout_offset={stdout_offset}&stderr_offset={stderr_offset}&follow=1&paced={int(paced)}"
    target = f"{PREFIX}procs/{pid}/output?{where}"
    return http1.request("GET", target, HEADERS, None)


def open_session(
    shell: str | None, cwd: str | None, env: dict[str, str] | None, user: str | None
) -> Call[SessionStarted]:
    return post("sessions", {"shell": shell, "cwd": cwd, "env": env, "user": user}, SessionStarted)


def session_run(sid: str, line: str, timeout_s: float | None, output_limit_bytes: int | None) -> Call[Result]:
    body = {"command": line, "timeout_s": timeout_s or None, "output_limit_bytes": output_limit_bytes}
    return post(f"sessions/{sid}/run", body, Result)


def close_session(sid: str) -> Call[None]:
    return delete(f"sessions/{sid}", type(None))


def query(**fields: object) -> str:
    """A query string of the fields that are set."""
    return urlencode({name: value for name, value in fields.items() if value is not None}, quote_via=quote)


class Frames:
    """Parses the stream of a process's output: u32be length + MessagePack, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames that are whole now."""
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= 4:
            length = int.from_bytes(self._buffer[at : at + 4], "big")
            if len(self._buffer) - at - 4 < length:
                break
            frames.append(decode(bytes(self._buffer[at + 4 : at + 4 + length]), dict))
            at += 4 + length
        del self._buffer[:at]
        return frames


def result_of(shape: dict[str, Any]) -> Result:
    """The Result in an end frame."""
    try:
        return msgspec.convert(shape, Result)
    except msgspec.ValidationError as error:
        raise ServerError(f"sandboxd's answer can't be read: {error}") from error

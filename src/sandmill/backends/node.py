"""NodeBackend: noded on this host, through its control API; and noded's own life as a child process."""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from sandmill.backends.base import Events, Inventory
from sandmill.errors import NodeError, NotFoundError, SandboxGoneError, SandmillError, ServerError, TransportError
from sandmill.sdk import calls, http1
from sandmill.sdk.async_connection import AsyncConnection, open_connection
from sandmill.sdk.asynchronous import AsyncChannel, AsyncFiles, run_live
from sandmill.sdk.connection import Endpoint
from sandmill.sdk.filecalls import Entry, target
from sandmill.sdk.live import Live
from sandmill.wire import (
    Collected,
    Collection,
    Exec,
    ImageInfo,
    Pulling,
    Result,
    SandboxEnd,
    SandboxInfo,
    SandboxSpec,
    Usage,
)

T = TypeVar("T")

CALL_S = 60.0
CREATE_S = 120.0
LONG_S = 3600.0
RECONNECT_S = 10.0
"""How long a call waits for a noded that is being restarted."""
READY_S = 20.0
LOCKED = "another noded runs"
"""What noded says when the state directory is taken."""
STOP_S = 30.0
MOST_IDLE = 64
TAR_PART_BYTES = 1024 * 1024

_encode = msgspec.json.Encoder().encode


class _List(msgspec.Struct):
    sandboxes: list[SandboxInfo]
    ended: list[SandboxEnd] = []


class _Event(msgspec.Struct):
    seq: int
    kind: str
    sandbox: SandboxEnd


class _Events(msgspec.Struct):
    events: list[_Event]
    next: int


class _Gone(msgspec.Struct):
    gone: list[str]


class _Images(msgspec.Struct):
    images: list[ImageInfo]


class _Pulls(msgspec.Struct):
    pulls: list[Pulling]


class NodeBackend:
    """Client of noded's control socket. Calls wait up to ten seconds for a noded that is being restarted."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._idle: deque[AsyncConnection] = deque()

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return await self._call("POST", "/v1/sandboxes", SandboxInfo, _encode(spec), CREATE_S)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return await self._call("GET", _of(sandbox_id), SandboxInfo)

    async def inventory(self) -> Inventory:
        found = await self._call("GET", "/v1/sandboxes", _List)
        return Inventory(found.sandboxes, found.ended)

    async def destroy(self, sandbox_id: str, cause: str = "killed") -> None:
        await self._call("DELETE", f"{_of(sandbox_id)}?cause={quote(cause)}", None)

    async def renew(self, leases: dict[str, float]) -> list[str]:
        return (await self._call("POST", "/v1/leases", _Gone, _encode({"renew": leases}))).gone

    async def set_lease(self, sandbox_id: str, ttl_s: float, renew_on_use: bool | None = None) -> None:
        body = _encode({"ttl_s": ttl_s, "renew_on_use": renew_on_use})
        await self._call("POST", f"{_of(sandbox_id)}/lease", None, body)

    async def usage(self, sandbox_id: str) -> Usage:
        return await self._call("GET", f"{_of(sandbox_id)}/usage", Usage)

    async def commit(self, sandbox_id: str, name: str | None, config: dict[str, Any] | None = None) -> ImageInfo:
        body = _encode({"name": name, "config": config})
        return await self._call("POST", f"{_of(sandbox_id)}/commit", ImageInfo, body, LONG_S, again=False)

    async def events(self, after: int, wait_s: float) -> Events:
        found = await self._call("GET", f"/v1/events?after={after}&wait_s={wait_s}", _Events, None, wait_s + CALL_S)
        return Events([event.sandbox for event in found.events if event.kind == "ended"], found.next)

    async def images(self) -> list[ImageInfo]:
        return (await self._call("GET", "/v1/images", _Images)).images

    async def image(self, name: str) -> ImageInfo:
        return await self._call("GET", f"/v1/images/{quote(name, safe='')}", ImageInfo)

    async def import_image(self, path: str, name: str | None, kind: str = "auto") -> ImageInfo:
        body = _encode({"path": path, "name": name, "format": kind})
        return await self._call("POST", "/v1/images/import", ImageInfo, body, LONG_S)

    async def pull_image(
        self, name: str, *, newest: bool = False, credentials: dict[str, str] | None = None
    ) -> ImageInfo:
        body = _encode({"name": name, "newest": newest, "credentials": credentials})
        return await self._call("POST", "/v1/images/pull", ImageInfo, body, LONG_S)

    async def pulls(self) -> list[Pulling]:
        return (await self._call("GET", "/v1/pulls", _Pulls)).pulls

    async def collect_images(self, collection: Collection) -> Collected:
        return await self._call("POST", "/v1/images/gc", Collected, _encode(collection), LONG_S)

    async def remove_image(self, name: str) -> None:
        await self._call("DELETE", f"/v1/images/{quote(name, safe='')}", None)

    async def health(self) -> dict[str, Any]:
        """`{"version", "node_id", "boot_id", "data_addr", "cgroup", "sandboxes"}`."""
        return await self._call("GET", "/v1/health", dict)

    async def doctor(self) -> dict[str, Any]:
        return await self._call("GET", "/v1/doctor", dict)

    async def shutdown(self, *, keep_sandboxes: bool) -> None:
        """Asks noded to end, with all sandboxes unless they are kept."""
        await self._call("POST", "/v1/shutdown", None, _encode({"keep_sandboxes": keep_sandboxes}), STOP_S, again=False)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T] | None,
        body: bytes | None = None,
        wait_s: float = CALL_S,
        *,
        again: bool = True,
    ) -> T:
        raw = http1.request(method, path, b"Host: noded\r\nContent-Type: application/json\r\n", body)
        give_up = asyncio.get_running_loop().time() + RECONNECT_S
        while True:
            try:
                head, answer = await self._exchange(raw, wait_s)
                break
            except TransportError as error:
                late = asyncio.get_running_loop().time() > give_up
                if error.code == "answer_timeout" or late or not (again or error.retryable):
                    raise NodeError(f"noded: {error.message}", code="node_unavailable", retryable=True) from error
            await asyncio.sleep(0.02)
        if head.status >= 300:
            raise calls.error_of(head, answer)
        if kind is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ServerError(f"noded's answer can't be read: {error}") from error

    async def _exchange(self, raw: bytes, wait_s: float) -> tuple[http1.Head, bytes]:
        connection = None
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                break
            connection.close()
            connection = None
        if connection is None:
            with SocketName(self._path) as name:
                connection = await open_connection(Endpoint("unix", name, 0), RECONNECT_S)
        head, body = await connection.exchange(raw, wait_s)
        if connection.healthy and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return head, body


class NodeIO:
    """A sandbox's own calls through the data gateway; implements `base.SandboxIO`, and tar streams.

    `look` asks after the sandbox when a connection breaks: it raises what it knows of its end.
    """

    def __init__(self, data_url: str, sandbox_id: str, token: str, look: Callable[[], Awaitable[object]]) -> None:
        async def why_gone() -> SandmillError | None:
            try:
                await look()
            except (SandboxGoneError, NotFoundError) as error:
                return error
            except SandmillError:
                return None
            return None

        self.channel = AsyncChannel(data_url, sandbox_id, token, why_gone)
        self.files = AsyncFiles(self.channel)

    async def run(self, command: Exec) -> Result:
        return await self.channel.call(calls.exec_(command), command.timeout_s or None)  # 0 is no timeout

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> None:
        await self.files.write(path, data, mode=mode, user=user)

    async def run_live(self, command: Exec, say: Callable[[bytes], object]) -> Result:
        """As `run`; its output is said as it comes."""
        return await run_live(self.channel, command, Live(command.output_limit_bytes, say, say))

    async def write_tar(
        self,
        path: str,
        data: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        user: str | None = None,
        keep_owners: bool = False,
    ) -> None:
        """Unpacks a tar into a directory. With `keep_owners` `user` is of the missing directories above alone."""
        where = target("tar", path, user=user, owners="keep" if keep_owners else None)
        await self.channel.upload(where, _parts(data) if isinstance(data, bytes) else data)

    def read_tar(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.files.read_tar(path)

    async def stat(self, path: str) -> Entry:
        return await self.files.stat(path, follow=True)

    async def make_directory(self, path: str, *, user: str | None = None) -> None:
        await self.files.mkdir(path, user=user)

    async def read(self, path: str) -> bytes:
        return await self.files.read(path)

    async def names(self, path: str) -> list[str]:
        entries = await self.files.list(path)
        return [entry.name for entry in entries]

    async def remove(self, path: str) -> None:
        await self.files.remove(path)

    async def close(self) -> None:
        self.channel.close()


def _parts(data: bytes) -> Iterator[bytes]:
    return (data[at : at + TAR_PART_BYTES] for at in range(0, len(data), TAR_PART_BYTES))


def _of(sandbox_id: str) -> str:
    return f"/v1/sandboxes/{quote(sandbox_id, safe='')}"


class SocketName:
    """A name of a unix socket that fits into 107 bytes, however long its path is, for the time of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) < 100:
            return str(self._path)
        self._folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def find_binary(name: str) -> Path:
    """A daemon's binary: $SANDMILL_NODED or $SANDMILL_SANDBOXD, else the package's own.

    Raises NodeError that says how to get one.
    """
    if told := os.environ.get(f"SANDMILL_{name.upper()}"):
        return Path(told)
    packaged = Path(__file__).resolve().parent.parent / "_bin" / name
    if packaged.is_file():
        return packaged
    raise NodeError(
        f"there is no {name} in this installation",
        code="node_unavailable",
        hint="in a source checkout run `make setup`; else install a wheel for this machine",
    )


class Noded:
    """noded as a child process: started or adopted, watched, started again when it dies.

    It survives this process unless `dies_with_us`: sandboxes outlive a killed serve, and the next one adopts it.
    """

    def __init__(
        self,
        state_dir: Path,
        data_listen: str,
        *,
        domain: str | None = None,
        dies_with_us: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        """`arguments`: further ones of noded's command line, for one that is started here (an adopted one has its own)."""
        self.state_dir = state_dir
        self.backend = NodeBackend(state_dir / "noded.sock")
        self.data_addr = ""
        self._data_listen = data_listen
        self._domain = domain
        self._dies_with_us = dies_with_us
        self._arguments = tuple(arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Adopts a running noded of this state directory, or starts one. Raises NodeError with what it said.

        One that listens elsewhere than asked is replaced; its sandboxes live on. Port 0 takes what there is.
        """
        pid = self._running()
        if pid is not None and not await self._listens_as_asked():
            await self._replace(pid)
            pid = None
        if pid is None:
            pid = await self._spawn_or_find()
        if pid is None:
            self._watch = asyncio.create_task(self._keep_running())
        else:
            self._watch = asyncio.create_task(self._keep_adopted(pid))
        self.data_addr = str((await self.backend.health())["data_addr"])
        self._data_listen = self.data_addr  # clients know it: the next one has to have the same

    async def _listens_as_asked(self) -> bool:
        asked = self._data_listen
        return asked.endswith(":0") or str((await self.backend.health())["data_addr"]) == asked

    async def _replace(self, pid: int) -> None:
        """Ends a noded and leaves its sandboxes for the next."""
        await self.backend.shutdown(keep_sandboxes=True)
        try:
            async with asyncio.timeout(STOP_S):
                await _wait_for_end(pid)
        except TimeoutError:
            _signal(pid, signal.SIGKILL)

    async def stop(self, *, keep_sandboxes: bool) -> None:
        """Ends noded; its sandboxes too unless they are kept."""
        self._stopping = True
        if self._watch is None:
            await self.backend.close()
            return  # it never started
        pid = self._process.pid if self._process else self._running()
        try:
            await self.backend.shutdown(keep_sandboxes=keep_sandboxes)
        except SandmillError:
            if pid is not None and not keep_sandboxes:
                _signal(pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._watch
        except TimeoutError:
            if pid is not None:
                _signal(pid, signal.SIGKILL)
        await self.backend.close()

    def _running(self) -> int | None:
        """Pid of a noded that has this state directory, by its note and the process's start time."""
        try:
            note = json.loads((self.state_dir / "noded.json").read_text())
            pid, started = int(note["pid"]), int(note["start_time"])
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            # A noded that was killed stays as a zombie until whoever is its parent now has reaped it.
            return pid if int(fields[18]) == started and state not in "ZX" else None
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None

    async def _spawn_or_find(self) -> int | None:
        """Starts noded; or gives the pid of one that came up meanwhile, started by a serve that was then killed."""
        deadline = asyncio.get_running_loop().time() + READY_S
        while True:
            try:
                await self._spawn()
                return None
            except NodeError as error:
                if LOCKED not in error.message or asyncio.get_running_loop().time() > deadline:
                    raise
            if (pid := self._running()) is not None:
                self._process = None
                return pid
            await asyncio.sleep(0.05)

    async def _spawn(self) -> None:
        binary = find_binary("noded")
        command = [str(binary), "--state-dir", str(self.state_dir), "--data-listen", self._data_listen]
        if self._domain:
            command += ["--domain", self._domain]
        command += self._arguments
        if "SANDMILL_SANDBOXD" in os.environ:
            command += ["--sandboxd", str(find_binary("sandboxd"))]
        if self._dies_with_us:
            command += ["--parent-death", "--ephemeral"]
        log = self.state_dir / "noded.log"
        with log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        deadline = asyncio.get_running_loop().time() + READY_S
        pause = 0.002
        while not (self.state_dir / "noded.sock").exists() or self._running() is None:
            if self._process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                hint = "run `sandmill doctor`"
                if "cannot listen" in said[0]:
                    port = self._data_listen.rpartition(":")[2]
                    hint = f"`ss -ltnp sport = :{port}` shows who listens there; --data-listen 127.0.0.1:0 picks a free port"
                raise NodeError(f"noded did not start: {said[0]}", code="node_unavailable", hint=hint)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    async def _keep_running(self) -> None:
        """Starts noded again whenever it dies; after quick deaths it waits longer."""
        pause = 0.0
        while True:
            assert self._process is not None
            started = asyncio.get_running_loop().time()
            await self._process.wait()
            if self._stopping:
                return
            pause = 0.0 if asyncio.get_running_loop().time() - started > 5 else min(max(0.05, pause * 2), 5.0)
            print(f"noded ended with {self._process.returncode}: starting it again", file=sys.stderr, flush=True)
            await asyncio.sleep(pause)
            try:
                await self._spawn()
            except NodeError as error:
                print(f"{error}; trying again", file=sys.stderr, flush=True)
                pause = min(max(0.1, pause * 2), 5.0)
                await asyncio.sleep(pause)

    async def _keep_adopted(self, pid: int) -> None:
        """Watches a noded that is not our child, and takes over when it dies."""
        found: int | None = pid
        while found is not None:
            await _wait_for_end(found)
            if self._stopping:
                return
            found = await self._spawn_or_find()
        await self._keep_running()


async def _wait_for_end(pid: int) -> None:
    """Of a process that need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

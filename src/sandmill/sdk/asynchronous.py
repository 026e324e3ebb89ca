"""`AsyncSandbox`, the asyncio client: the same calls, and the same answers, as `Sandbox`.

Control calls (create, kill, renew: rare) go through the blocking client in a thread; the data path is asyncio throughout.
"""

import asyncio
import inspect
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Literal, TypeVar

import msgspec

from sandmill.errors import NotFoundError, SandmillError, TransportError
from sandmill.sdk import calls, http1
from sandmill.sdk.async_connection import AsyncConnection, open_connection
from sandmill.sdk.channel import ANSWER_S, ASK_AGAIN_S, MOST_IDLE, attach_request
from sandmill.sdk.connection import Endpoint
from sandmill.sdk.control import Control
from sandmill.sdk.filecalls import Entry, Listing, Path, Removed, decode_name, fs, get, name_of, put, target
from sandmill.sdk.live import Listener, Live
from sandmill.sdk.offload import make, offload
from sandmill.sdk.process import STREAMS, Output
from sandmill.sdk.sandbox import control_for, heartbeat_of, hold
from sandmill.wire import CreateSandbox, Exec, ImageInfo, ProcInfo, Result, SandboxView, Usage

T = TypeVar("T")
Views = list[SandboxView]
Procs = list[ProcInfo]
Entries = list[Entry]


class AsyncChannel:
    """The data path of one sandbox for one event loop; twin of `channel.Channel`."""

    def __init__(
        self, url: str, sandbox_id: str, token: str, why_gone: Callable[[], Awaitable[SandmillError | None]]
    ) -> None:
        self._endpoint = Endpoint.parse(url)
        self._attach = attach_request(self._endpoint, sandbox_id, token)
        self._idle: deque[AsyncConnection] = deque()
        self._why_gone = why_gone
        self._closed = False

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def call(self, call: calls.Call[T], wait_s: float | None = None) -> T:
        """One call. Cancelling it closes its connection; a command is ended then with all that it started."""
        limit_s = None if wait_s is None else wait_s + ANSWER_S
        while True:
            connection = await self._take()
            try:
                head, body = await connection.exchange(call.raw, limit_s)
            except TransportError as error:
                if call.idempotent and error.code != "answer_timeout" and await self._why_gone() is None:
                    call = msgspec.structs.replace(call, idempotent=False)  # once
                    continue
                raise await self._explain(error) from error
            self._give(connection)
            return calls.answer(call, head, body)

    @asynccontextmanager
    async def stream(self, raw: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """A call whose answer is a stream. Leaving the block early closes the connection."""
        connection = await self._take()
        try:
            connection.send(raw)
            reader = await connection.read_head()
            assert reader.head is not None
            if reader.head.status >= 300:
                raise calls.error_of(reader.head, b"".join([part async for part in connection.body(reader)]))
            yield connection.body(reader)
            if not reader.done:
                connection.close()
        except TransportError as error:
            connection.close()
            raise await self._explain(error) from error
        except BaseException:
            connection.close()
            raise
        self._give(connection)

    async def upload(self, where: str, parts: Iterable[bytes] | AsyncIterable[bytes]) -> bytes:
        connection = await self._take()
        try:
            connection.send(http1.head("PUT", where, calls.RAW, None))
            await connection.send_body(parts, chunked=True)
            reader = await connection.read_head()
            body = b"".join([part async for part in connection.body(reader)])
        except TransportError as error:
            connection.close()
            raise await self._explain(error) from error
        except BaseException:
            connection.close()
            raise
        assert reader.head is not None
        self._give(connection)
        if reader.head.status >= 300:
            raise calls.error_of(reader.head, body)
        return body

    async def _take(self) -> AsyncConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        if self._closed:
            raise TransportError("this AsyncSandbox object is closed", code="closed")
        try:
            connection = await open_connection(self._endpoint)
        except TransportError as error:
            raise await self._explain(error) from error
        try:
            async with asyncio.timeout(ANSWER_S):
                connection.send(self._attach)
                reader = await connection.read_head()
                assert reader.head is not None
                if reader.head.status != 101:
                    said = calls.error_of(reader.head, b"".join([part async for part in connection.body(reader)]))
                    raise await self._why_gone() or said
        except (TimeoutError, TransportError) as broken:
            connection.close()
            failed = TransportError(f"cannot attach to the sandbox: {broken}", retryable=True)
            raise await self._explain(failed) from broken
        except BaseException:
            connection.close()
            raise
        return connection

    def _give(self, connection: AsyncConnection) -> None:
        if connection.healthy and not self._closed and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def _explain(self, error: TransportError) -> SandmillError:
        if error.code in ("answer_timeout", "closed"):
            return error
        for pause in ASK_AGAIN_S:
            if (gone := await self._why_gone()) is not None:
                return gone
            await asyncio.sleep(pause)
        return await self._why_gone() or error


class AsyncProcess:
    """A process that runs on its own; twin of `Process`."""

    def __init__(self, channel: AsyncChannel, pid: int, *, paced: bool = False) -> None:
        self._channel = channel
        self._paced = paced
        self.pid = pid
        self.result: Result | None = None
        self._offsets = [0, 0]

    async def output(
        self, *, stdout_offset: int | None = None, stderr_offset: int | None = None
    ) -> AsyncIterator[Output]:
        """Its output from the given byte offsets (default: where this object stopped reading), then live to its end."""
        first = self._offsets[0] if stdout_offset is None else stdout_offset
        second = self._offsets[1] if stderr_offset is None else stderr_offset
        frames = calls.Frames()
        gaps: dict[str, int] = {}
        async with self._channel.stream(calls.output(self.pid, first, second, self._paced)) as parts:
            async for part in parts:
                for frame in frames.feed(part):
                    kind = frame["t"]
                    if kind in STREAMS:
                        self._offsets[kind == "e"] = frame["off"] + len(frame["d"])
                        yield Output(STREAMS[kind], frame["d"], frame["off"], gaps.pop(kind, 0))
                    elif kind == "gap":
                        gaps[frame["s"]] = gaps.get(frame["s"], 0) + frame["n"]
                    elif kind == "end":
                        self.result = calls.result_of(frame["r"])

    async def write(self, data: bytes | str) -> None:
        await self._channel.call(calls.stdin(self.pid, data.encode() if isinstance(data, str) else data, False))

    async def close_stdin(self) -> None:
        await self._channel.call(calls.stdin(self.pid, b"", True))

    async def signal(self, number: int, *, tree: bool = False) -> None:
        await self._channel.call(calls.signal(self.pid, number, tree))

    async def resize(self, rows: int, cols: int) -> None:
        await self._channel.call(calls.resize(self.pid, rows, cols))

    async def wait(self, timeout_s: float | None = None) -> Result:
        self.result = await self._channel.call(calls.wait(self.pid, timeout_s), timeout_s)
        return self.result

    async def kill(self) -> Result:
        self.result = await self._channel.call(calls.kill(self.pid))
        return self.result


class AsyncSession:
    """A shell that lasts between commands; twin of `Session`."""

    def __init__(self, channel: AsyncChannel, sid: str, pid: int) -> None:
        self._channel = channel
        self.id = sid
        self.pid = pid

    async def run(self, line: str, *, timeout_s: float | None = None, output_limit_bytes: int | None = None) -> Result:
        return await self._channel.call(calls.session_run(self.id, line, timeout_s, output_limit_bytes), timeout_s)

    async def close(self) -> None:
        try:
            await self._channel.call(calls.close_session(self.id))
        except SandmillError:
            pass

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def run_live(channel: AsyncChannel, spec: Exec, live: Live) -> Result:
    """Runs a command to its end, its output handed over as it comes; it never runs on without us."""
    started = await channel.call(calls.start(spec, pty=None, tag=None, keep_stdin=False, paced=True))
    process = AsyncProcess(channel, started.pid, paced=True)
    try:
        async for piece in process.output(stdout_offset=0, stderr_offset=0):
            listened = live.take(piece)
            if inspect.isawaitable(listened):
                await listened
        end = process.result or await process.wait()
    except BaseException:
        try:
            await asyncio.shield(asyncio.ensure_future(process.kill()))
        except SandmillError:
            pass
        raise
    return live.result(end)


class AsyncFiles:
    """Files of one sandbox; twin of `Files`."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel

    async def read(self, path: Path, *, offset: int | None = None, length: int | None = None) -> bytes:
        async with self._channel.stream(get("files", path, offset=offset, length=length)) as parts:
            return b"".join([part async for part in parts])

    async def read_text(self, path: Path, encoding: str = "utf-8") -> str:
        return (await self.read(path)).decode(encoding)

    async def write(
        self,
        path: Path,
        data: bytes | str | Iterable[bytes] | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = True,
    ) -> Entry:
        where = target("files", path, mode=None if mode is None else f"{mode:o}", user=user, parents=int(parents))
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, (bytes, bytearray, memoryview)):
            return await self._channel.call(put(where, bytes(data)))
        return calls.decode(await self._channel.upload(where, data), Entry, decode_name)

    async def stat(self, path: Path, *, follow: bool = False) -> Entry:
        return await self._channel.call(fs("stat", path, Entry, follow=follow))

    async def exists(self, path: Path) -> bool:
        try:
            await self.stat(path)
        except NotFoundError:
            return False
        return True

    async def list(self, path: Path, *, depth: int = 1) -> Entries:
        return (await self._channel.call(fs("list", path, Listing, depth=depth))).entries

    async def mkdir(self, path: Path, *, mode: int = 0o755, user: str | None = None, exist_ok: bool = True) -> Entry:
        return await self._channel.call(fs("mkdir", path, Entry, mode=mode, user=user, exist_ok=exist_ok))

    async def move(self, path: Path, to: Path, *, overwrite: bool = True) -> Entry:
        return await self._channel.call(fs("move", path, Entry, idempotent=False, to=name_of(to), overwrite=overwrite))

    async def remove(self, path: Path, *, missing_ok: bool = False) -> int:
        return (await self._channel.call(fs("remove", path, Removed, idempotent=False, missing_ok=missing_ok))).removed

    async def chmod(self, path: Path, mode: int, *, recursive: bool = False) -> Entry:
        return await self._channel.call(fs("chmod", path, Entry, mode=mode, recursive=recursive))

    async def write_tar(
        self, path: Path, parts: Iterable[bytes] | AsyncIterable[bytes], *, user: str | None = None
    ) -> None:
        """Unpacks a tar stream into the directory `path`."""
        await self._channel.upload(target("tar", path, user=user), parts)

    @asynccontextmanager
    async def read_tar(self, path: Path) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._channel.stream(get("tar", path)) as parts:
            yield parts


class AsyncSandbox:
    """An isolated sandbox, for asyncio: `async with await AsyncSandbox.create() as box`.

    Arguments, results and errors are those of `Sandbox`. Cancelling `create` undoes it; cancelling `run` ends the command.
    """

    def __init__(self, control: Control, view: SandboxView, lease_s: float | None) -> None:
        """Use `create` or `connect`."""
        self._control = control
        self._info = view
        self._channel = AsyncChannel(view.data_url, view.id, view.access_token, self._why_gone)
        self.files = AsyncFiles(self._channel)
        self._held = lease_s is not None
        if lease_s is not None:
            hold(control, self._channel, view.id, lease_s)

    async def _why_gone(self) -> SandmillError | None:
        return await offload(self._control.why_gone, self.id)

    @classmethod
    async def create(
        cls,
        image: str = "host",
        *,
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        network: str = "none",
        cpu: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        pids: int | None = None,
        inodes: int | None = None,
        shm_mb: int | None = None,
        lease_s: float = 300.0,
        metadata: dict[str, str] | None = None,
        name: str | None = None,
        pull: Literal["missing", "always", "never"] = "missing",
        api_url: str | None = None,
        api_key: str | None = None,
    ) -> "AsyncSandbox":
        spec = CreateSandbox(
            image=image,
            env=env or {},
            workdir=workdir,
            user=user,
            network=network,
            cpu=cpu,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            pids=pids,
            inodes=inodes,
            shm_mb=shm_mb,
            lease_s=lease_s,
            metadata=metadata or {},
            name=name,
            pull=pull,
        )
        control = await offload(control_for, api_url, api_key)
        key = os.urandom(16).hex()
        view = await make(lambda: control.create(spec, key), lambda made: control.kill(made.id))
        return cls(control, view, lease_s)

    @classmethod
    async def connect(
        cls, sandbox_id: str, *, api_url: str | None = None, api_key: str | None = None
    ) -> "AsyncSandbox":
        control = await offload(control_for, api_url, api_key)
        return cls(control, await offload(control.get, sandbox_id), None)

    @staticmethod
    async def list(
        metadata: dict[str, str] | None = None, *, api_url: str | None = None, api_key: str | None = None
    ) -> Views:
        control = await offload(control_for, api_url, api_key)
        return await offload(control.list, metadata)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> SandboxView:
        return self._info

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.id} {self._info.image}>"

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        output_limit_bytes: int | None = None,
        check: bool = False,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
    ) -> Result:
        """`on_stdout` and `on_stderr` may be coroutine functions."""
        spec = calls.command(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
        )
        if on_stdout is None and on_stderr is None:
            result = await self.execute(spec)
        else:
            result = await run_live(self._channel, spec, Live(output_limit_bytes, on_stdout, on_stderr))
        return result.check() if check else result

    async def execute(self, spec: Exec) -> Result:
        """Runs a command given as data."""
        return await self._channel.call(calls.exec_(spec), spec.timeout_s)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout_s: float | None = None,
        pty: tuple[int, int] | None = None,
        tag: str | None = None,
        paced: bool = False,
    ) -> AsyncProcess:
        spec = calls.command(
            command, cwd=cwd, env=env, user=user, stdin=None, timeout_s=timeout_s, output_limit_bytes=None
        )
        call = calls.start(spec, pty=pty, tag=tag, keep_stdin=stdin or pty is not None, paced=paced)
        return AsyncProcess(self._channel, (await self._channel.call(call)).pid, paced=paced)

    def attach(self, pid: int) -> AsyncProcess:
        return AsyncProcess(self._channel, pid)

    async def processes(self) -> Procs:
        return (await self._channel.call(calls.procs())).procs

    async def session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncSession:
        made = await self._channel.call(calls.open_session(shell, cwd, env, user))
        return AsyncSession(self._channel, made.session_id, made.pid)

    async def usage(self) -> Usage:
        return await offload(self._control.usage, self.id)

    async def renew(self, lease_s: float) -> None:
        await offload(self._control.renew, self.id, lease_s)
        heartbeat_of(self._control).renewed(self.id, lease_s)

    async def commit(self, name: str | None = None) -> ImageInfo:
        self._let_go()
        return await offload(self._control.commit, self.id, name)

    async def kill(self) -> bool:
        """Ends it. Goes on to its end when cancelled."""
        self._let_go()
        return await asyncio.shield(offload(self._control.kill, self.id))

    def _let_go(self) -> None:
        if self._held:
            heartbeat_of(self._control).release(self.id)
        self._channel.close()

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held:
            self._let_go()
            return
        try:
            await self.kill()
        except SandmillError:
            if error is None:
                raise

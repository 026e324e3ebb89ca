"""`Sandbox`, the blocking client."""

import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from sandmill.errors import SandmillError
from sandmill.sdk import calls
from sandmill.sdk.channel import Channel
from sandmill.sdk.configuration import Server, configured
from sandmill.sdk.connection import Connection, Dial
from sandmill.sdk.control import Control, control_of
from sandmill.sdk.files import Files
from sandmill.sdk.heartbeat import Heartbeat
from sandmill.sdk.live import Listener, Live
from sandmill.sdk.process import Process, Session
from sandmill.wire import CreateSandbox, Exec, ImageInfo, ProcInfo, Result, SandboxView, Usage

Views = list[SandboxView]
Procs = list[ProcInfo]

_heartbeats: dict[Control, Heartbeat] = {}


def control_for(api_url: str | None, api_key: str | None) -> Control:
    """The client of the configured server, else of the embedded one."""
    server: Server | None = configured(api_url, api_key)
    if server is None:
        from sandmill.sdk.embedded import embedded_server

        server = embedded_server()
    return control_of(server)


os.register_at_fork(after_in_child=_heartbeats.clear)  # what the parent holds open, a child doesn't


def hold(control: Control, channel: object, sandbox_id: str, lease_s: float) -> None:
    """Renews the lease until it is released, or until `channel` is gone and with it all that could use the sandbox."""
    heartbeat = heartbeat_of(control)
    heartbeat.hold(sandbox_id, lease_s)
    weakref.finalize(channel, heartbeat.release, sandbox_id).atexit = False


def heartbeat_of(control: Control) -> Heartbeat:
    if control not in _heartbeats:
        _heartbeats[control] = Heartbeat(control.renew_many)
    return _heartbeats[control]


class Sandbox:
    """An isolated sandbox: made on construction, ended by `kill()` or at the end of its `with` block.

    ```python
    with Sandbox(image="host", memory_mb=512) as box:
        result = box.run("pytest -q", timeout_s=300)
    ```

    Without a configured server (`api_url`, or SANDMILL_API_URL and SANDMILL_API_KEY) the first sandbox of a process starts
    an embedded one, which ends with the process. All methods are thread-safe.

    Args:
        image: `host` (this machine's own programs under a private overlay), the name or id of an image in the store, or
            a name in a registry, such as `python:3.12`.
        env: Environment of everything that runs inside, over the image's.
        workdir: Default working directory; made if missing.
        user: Default user of commands: a name, a uid or `uid:gid`. Default: the image's, else root.
        network: `none` or `all`.
        cpu: Cores. memory_mb, disk_mb, shm_mb: MiB. pids, inodes: counts. None: no limit of its own.
            `info.limits.enforced_by` says what enforces each; one that nothing here can enforce is an error.
        lease_s: Seconds that it lives without being used or held by a living client.
        metadata: Strings to find it by.
        pull: When the image's registry is asked: if the image is `missing` here, `always`, or `never`.

    Raises:
        UsageError: an argument that can't be. NotFoundError: no such image. AuthError: the key. ImageError: its registry
        wants a login, limits the rate or can't be reached.
        NodeError: the node can't (limits, exhausted). TransportError: the server can't be reached.
        A create that is interrupted is undone.
    """

    def __init__(
        self,
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
    ) -> None:
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
        control = control_for(api_url, api_key)
        key = os.urandom(16).hex()
        dial = Dial(control.data_url)
        try:
            view = control.create(spec, key, dial)
        except SandmillError:
            dial.close()
            raise
        except BaseException:
            dial.close()
            # Interrupted: whether it was made is unknown. The same key gives the same sandbox, which is then ended.
            try:
                control.kill(control.create(spec, key).id)
            except SandmillError:
                pass  # its lease ends it
            raise
        self._open(control, view, lease_s, dial.to(view.data_url))

    def _open(
        self, control: Control, view: SandboxView, lease_s: float | None, opened: Connection | None = None
    ) -> None:
        self._control = control
        self._info = view
        self._channel = Channel(view.data_url, view.id, view.access_token, lambda: control.why_gone(view.id), opened)
        self.files = Files(self._channel)
        """Its files."""
        self._held = lease_s is not None
        if lease_s is not None:
            hold(control, self._channel, view.id, lease_s)

    @classmethod
    def connect(cls, sandbox_id: str, *, api_url: str | None = None, api_key: str | None = None) -> "Sandbox":
        """An existing sandbox. Its lease is renewed by use only, and leaving a `with` block does not end it.

        Raises NotFoundError, SandboxGoneError (with the cause).
        """
        control = control_for(api_url, api_key)
        self = cls.__new__(cls)
        self._open(control, control.get(sandbox_id), None)
        return self

    @staticmethod
    def list(
        metadata: dict[str, str] | None = None, *, api_url: str | None = None, api_key: str | None = None
    ) -> Views:
        """Living sandboxes whose metadata has all of the given pairs."""
        return control_for(api_url, api_key).list(metadata)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> SandboxView:
        """What the server said at creation (or connect)."""
        return self._info

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self._info.image}>"

    def run(
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
        """Runs a command to its end: a shell line (str), or a program with its arguments (list).

        A timeout is a result (`reason == "timeout"`) with the output so far; everything that the command started is ended. So
        is a command that fails. What it leaves running in the background lives on. Output is bytes; beyond
        `output_limit_bytes` a stream (default 16 MiB) its middle is cut, which the result says. With `on_stdout` or
        `on_stderr` output is handed over live as well; what they raise ends the command.

        Raises:
            UsageError: no such directory, program or user; an argument too long.
            CommandError, CommandTimeoutError: only with `check`.
            SandboxGoneError: the sandbox has ended; `cause` says why.
            TransportError: the connection broke. The command is never run again.
        """
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
            result = self._channel.call(calls.exec_(spec), timeout_s or None)
        else:
            result = self._run_live(spec, Live(output_limit_bytes, on_stdout, on_stderr))
        return result.check() if check else result

    def _run_live(self, spec: Exec, live: Live) -> Result:
        started = self._channel.call(calls.start(spec, pty=None, tag=None, keep_stdin=False, paced=True))
        process = Process(self._channel, started.pid, paced=True)
        try:
            for piece in process.output(stdout_offset=0, stderr_offset=0):
                live.take(piece)
            end = process.result or process.wait()
        except BaseException:
            try:
                process.kill()
            except SandmillError:
                pass
            raise
        return live.result(end)

    def start(
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
    ) -> Process:
        """Starts a command that runs on its own. With `stdin` its input stays open; with `pty` (rows, columns) it has a
        terminal. With `paced` it waits for who reads `output`, as at a pipe, so that nothing is missing there; without,
        it never waits, and a reader that falls behind by 1 MiB is told what it missed. Raises what `run` raises."""
        spec = calls.command(
            command, cwd=cwd, env=env, user=user, stdin=None, timeout_s=timeout_s, output_limit_bytes=None
        )
        call = calls.start(spec, pty=pty, tag=tag, keep_stdin=stdin or pty is not None, paced=paced)
        return Process(self._channel, self._channel.call(call).pid, paced=paced)

    def attach(self, pid: int) -> Process:
        """A process that was started earlier, by this client or another."""
        return Process(self._channel, pid)

    def processes(self) -> Procs:
        """Processes that `start` started and that run, or have ended lately."""
        return self._channel.call(calls.procs()).procs

    def session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """Opens a shell that lasts between commands."""
        made = self._channel.call(calls.open_session(shell, cwd, env, user))
        return Session(self._channel, made.session_id, made.pid)

    def usage(self) -> Usage:
        """What it consumes: CPU, memory now and peak, I/O, processes, disk."""
        return self._control.usage(self.id)

    def renew(self, lease_s: float) -> None:
        """Sets the end of its lease to `lease_s` from now; use, and this process while it holds it, renew it by as much."""
        self._control.renew(self.id, lease_s)
        heartbeat_of(self._control).renewed(self.id, lease_s)

    def commit(self, name: str | None = None) -> ImageInfo:
        """Ends it and keeps its changes as an image (without a name: until removed or unused at a restart)."""
        self._let_go()
        return self._control.commit(self.id, name)

    def kill(self) -> bool:
        """Ends it; when this returns nothing of it is left. False if it was gone already."""
        self._let_go()
        return self._control.kill(self.id)

    def close(self) -> None:
        """Lets go of it without ending it: its lease decides."""
        self._let_go()

    def _let_go(self) -> None:
        if self._held:
            heartbeat_of(self._control).release(self.id)
        self._channel.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held:
            self.close()
            return
        try:
            self.kill()
        except SandmillError:
            if error is None:
                raise
            # The body's own error is the one to see; the lease ends the sandbox.


def prepare(
    image: str = "host",
    steps: Sequence[dict[str, object]] = (),
    *,
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    network: str = "all",
    api_url: str | None = None,
    api_key: str | None = None,
) -> str:
    """Prepares an environment once (an image plus steps), and gives the name of the image for `Sandbox(image=...)`.

    Steps are `{"run": shell line}` or `{"copy": {path: content as base64}}`. The result is kept under the hash of all
    that goes in; who asks for the same waits for the same preparation. Raises PreparationError with the step and its output.
    """
    body = {
        "image": image,
        "steps": list(steps),
        "env": env or {},
        "workdir": workdir,
        "user": user,
        "network": network,
    }
    return control_for(api_url, api_key).prepare(body).image

"""`sandbox="sandmill"` for Inspect (`inspect-ai`); the entry point of pyproject.toml registers it.

```python
Task(..., sandbox="sandmill")
Task(..., sandbox=("sandmill", "sandmill.yaml"))
Task(..., sandbox=SandboxEnvironmentSpec("sandmill", SandmillConfig(image="host", memory_mb=512)))
```

The server is that of SANDMILL_API_URL and SANDMILL_API_KEY, else an embedded one that ends with the eval.

- *Who says what went wrong*: what a command or a path is at fault for is a result, or the built-in error that Inspect expects.
  A failure of the infrastructure is a `SandmillError`, which fails the sample (Inspect's `retry_on_error` runs it anew), so
  that it never becomes a score. Only a sandbox whose own processes used up its memory is Inspect's `SandboxUnavailableError`,
  which the model gets to see.
- *Retries*: none. A command that ran into its timeout may have done half of its work, so `timeout_retry` changes nothing.
- *Files* are read and written with the rights of the sandbox's default user, as Inspect expects. Sandmill's file calls act as
  root, so they serve only a default user that is root (and then need nothing of the image); for another one `head`, `mkdir` and
  `tee` run as that user.
"""

import asyncio
import errno
import logging
import os
import posixpath
import shlex
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import yaml
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    concurrency,
    sandboxenv,
)
from inspect_ai.util._subprocess import max_subprocesses_context_var
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape

from sandmill.errors import SandboxGoneError, SandmillError, UsageError
from sandmill.sdk.asynchronous import AsyncSandbox
from sandmill.sdk.configuration import configured
from sandmill.sdk.connection import Endpoint
from sandmill.wire import Result

logger = logging.getLogger(__name__)

FILES_S = 600.0
"""How long reading or writing one file may take."""
PROBE_S = 60.0
"""How long a new sandbox may take to say who and where it is."""
POLL_S = 0.2
"""How often Inspect looks for requests of a service in a sandbox; a look costs a few milliseconds."""
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs that run on Inspect's behalf come from: no directory that a user of the image may own."""
CLIENT = {"client": "inspect"}
"""Metadata of every sandbox made here."""
PROCESS = uuid.uuid4().hex
"""Metadata that tells the sandboxes of this process from those of others on the same server."""

PROBE = """
while read -r name value; do case "$name" in Uid: | Gid:) echo "${value%%[!0-9]*}" ;; esac; done </proc/self/status
pwd
"""
READ = """
[ -f "$1" ] || [ -d "$1" ] || [ ! -e "$1" ] || exit 3
exec head -c "$2" -- "$1"
"""
WRITE = """
mkdir -p -- "${1%/*}/" && exec tee -- "$1" >/dev/null
"""
NOT_REGULAR = 3

ERRNO_OF_CODE = {
    "not_found": errno.ENOENT,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "permission_denied": errno.EACCES,
    "read_only": errno.EACCES,
    "path_too_long": errno.ENAMETOOLONG,
    "arguments_too_long": errno.ENAMETOOLONG,
    "too_many_links": errno.ELOOP,
    "no_space": errno.ENOSPC,
    "not_a_regular_file": errno.EINVAL,
}
"""What a path can be at fault for, of sandboxd's codes."""

ERRNO_OF_TEXT = {os.strerror(number): number for number in set(ERRNO_OF_CODE.values())} | {
    os.strerror(errno.EPERM): errno.EACCES,
    os.strerror(errno.EROFS): errno.EACCES,
    os.strerror(errno.EEXIST): errno.ENOTDIR,  # mkdir -p: what is there is no directory
}
"""The same, of the text that programs print in the C locale."""

EXIT_OF_CODE = {"command_not_found": 127, "cwd_not_found": 126, "arguments_too_long": 126}
"""What a command is at fault for before it runs, as the exit code of a shell."""


class SandmillConfig(BaseModel):
    """A sandbox, as a task asks for it: in Python, or in a YAML file of the same fields. Meanings are those of `Sandbox`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = "host"
    """`host` (this machine's own programs under a private overlay), or the name or id of an image in the store."""
    env: dict[str, str] = {}
    """Environment of everything that runs inside. It is kept in the eval's log."""
    workdir: str | None = Field(default=None, pattern="^/")
    """Where relative paths begin. Made if missing, for the default user. Default: the image's, else the user's home."""
    user: str | None = None
    """Default user: a name, a uid or `uid:gid`. Default: the image's, else root."""
    network: Literal["none", "all"] = "none"
    cpu: float | None = Field(default=None, gt=0)
    """Cores."""
    memory_mb: int | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)
    pids: int | None = Field(default=None, gt=0)
    inodes: int | None = Field(default=None, gt=0)
    shm_mb: int | None = Field(default=None, gt=0)
    lease_s: float = Field(default=300.0, gt=0)
    """How long a sandbox outlives an eval that was killed, or that ran with `--no-sandbox-cleanup`."""

    def __hash__(self) -> int:
        # Inspect keeps configurations in sets, and a dict has no hash of its own.
        return hash(self.model_dump_json())


@sandboxenv(name="sandmill")
class SandmillSandboxEnvironment(SandboxEnvironment):
    """One sandbox of one sample."""

    def __init__(self, box: AsyncSandbox, workdir: str, is_root: bool) -> None:
        """Use `opened`."""
        super().__init__()
        self._box = box
        self._workdir = workdir
        self._is_root = is_root
        self._is_local = _is_loopback(Endpoint.parse(box.info.data_url).host)

    @classmethod
    async def opened(cls, config: SandmillConfig, metadata: dict[str, str]) -> "SandmillSandboxEnvironment":
        """Makes a sandbox. Raises SandmillError; what was made is ended then, and when cancelled."""
        box = await AsyncSandbox.create(
            config.image,
            env=config.env,
            user=config.user,
            network=config.network,
            cpu=config.cpu,
            memory_mb=config.memory_mb,
            disk_mb=config.disk_mb,
            pids=config.pids,
            inodes=config.inodes,
            shm_mb=config.shm_mb,
            lease_s=config.lease_s,
            metadata=CLIENT | {"process": PROCESS} | metadata,
        )
        try:
            probe = await box.run(["/bin/sh", "-c", PROBE], timeout_s=PROBE_S)
            try:
                uid, gid, workdir = probe.check().text.splitlines()
            except ValueError:
                raise UsageError(f"the image's /bin/sh is none: it said {probe.text[:200]!r}") from None
            if config.workdir is not None:
                workdir = config.workdir
                # Not at the create: there it would be root's, and the user could not write to it.
                await box.files.mkdir(workdir, user=f"{uid}:{gid}")
            return cls(box, workdir, uid == "0")
        except BaseException:
            await _end(box)
            raise

    # commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command; Inspect's contract, with these choices:

        A signal's exit code is 128 + its number. Output beyond Inspect's limit raises OutputLimitExceededError with the first
        and the last half of what fits. A user that the sandbox does not have raises SandboxUserUnsupportedError.
        `concurrency` heeds Inspect's `max_subprocesses` where the server runs on this machine.
        """
        if any("\0" in text for text in (*cmd, cwd or "", *(env or {}).values())):
            raise ValueError("embedded null byte")  # as Python's; Inspect tells the model
        limit_bytes = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        async with AsyncExitStack() as stack:
            if concurrency and self._is_local:
                await stack.enter_async_context(_subprocess_slot())
            try:
                result = await self._box.run(
                    cmd,
                    cwd=self._path(cwd) if cwd else self._workdir,
                    env=env,
                    user=user or None,
                    stdin=input,
                    timeout_s=timeout,
                    output_limit_bytes=limit_bytes,
                )
            except SandmillError as error:
                if (code := EXIT_OF_CODE.get(error.code)) is not None:
                    return ExecResult(False, code, "", f"{error.message}\n")
                if error.code == "command_not_executable":
                    raise PermissionError(errno.EACCES, error.message, cmd[0]) from error
                if error.code == "user_not_found":
                    raise SandboxUserUnsupportedError(error.message) from error
                raise _seen_by_inspect(error) from error
        stdout, stderr = _text(result.stdout, result.stdout_cut), _text(result.stderr, result.stderr_cut)
        if result.reason == "timeout":
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            late.truncated_output = stdout + stderr or None  # type: ignore[attr-defined]  # Inspect looks for it
            raise late
        if result.stdout_cut or result.stderr_cut:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout + stderr)
        return ExecResult(result.ok, _exit_code(result), stdout, stderr)

    # files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a whole file, with the directories above it.

        Raises:
            IsADirectoryError, PermissionError (also where nothing can be written), or another OSError: the path's fault.
            TimeoutError: after `FILES_S`.
        """
        path = self._path(file)
        data = contents.encode() if isinstance(contents, str) else contents
        with _faults_of(file):
            if self._is_root:
                async with asyncio.timeout(FILES_S):
                    await self._box.files.write(path, data)
            else:
                _checked(await self._as_user(WRITE, path, stdin=data), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a whole file, as text with its newlines as they are.

        Raises:
            FileNotFoundError: it isn't there, or can't be.
            IsADirectoryError, PermissionError, or another OSError: the path's fault.
            UnicodeDecodeError: with `text`, what isn't UTF-8.
            OutputLimitExceededError: it is longer than Inspect's limit.
            TimeoutError: after `FILES_S`.
        """
        path = self._path(file)
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        # One byte more than the limit tells, whatever size the file says it has.
        most = limit_bytes + 1
        try:
            with _faults_of(file):
                if self._is_root:
                    async with asyncio.timeout(FILES_S):
                        data = await self._box.files.read(path, length=most)
                else:
                    data = _checked(await self._as_user(READ, path, str(most), output_limit_bytes=2 * most), file)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file) from error
            raise
        if len(data) > limit_bytes:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("embedded null byte")
        return posixpath.join(self._workdir, path)

    async def _as_user(
        self, script: str, *words: str, stdin: bytes | None = None, output_limit_bytes: int | None = None
    ) -> Result:
        result = await self._box.run(
            ["/bin/sh", "-c", script, "sh", *words],
            cwd="/",
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
            stdin=stdin,
            timeout_s=FILES_S,
            output_limit_bytes=output_limit_bytes,
        )
        if result.reason == "timeout":
            raise TimeoutError(f"{words[0]}: not done after {FILES_S:.0f} seconds")
        return result

    # what a person sees

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets a shell in it, who has the server's key.

        Raises:
            NotImplementedError: the server is an embedded one, whose key is this process's alone.
            ConnectionError: the sandbox has ended, or the server doesn't answer.
        """
        server = configured()
        if server is None:
            raise NotImplementedError("an embedded server lets nobody else in; `sandmill serve` starts one that does")
        try:
            async with await AsyncSandbox.connect(self._box.id):
                pass
        except SandmillError as error:
            raise ConnectionError(str(error)) from error
        words = ["sandmill", "shell", "--workdir", self._workdir, *(["--user", user] if user else []), self._box.id]
        return SandboxConnection(
            type="sandmill",
            command=f"SANDMILL_API_URL={shlex.quote(server.api_url)} {shlex.join(words)}",
            container=self._box.id,
        )

    def default_polling_interval(self) -> float:
        """Seconds."""
        return POLL_S

    # Inspect's hooks

    @classmethod
    def default_concurrency(cls) -> int | None:
        """No limit of ours: the node admits what it can hold, and Inspect's `max_samples` and `max_sandboxes` limit as well."""
        return None

    @classmethod
    def config_files(cls) -> list[str]:
        """What is looked for beside a task that gives no configuration."""
        return ["sandmill.yaml", "sandmill.yml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """From a log, or another program's data. Raises pydantic's ValidationError."""
        return SandmillConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Makes and ends a sandbox, so that a mistake in the configuration ends the eval before its first sample.

        Raises PrerequisiteError, which Inspect shows without a traceback.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise PrerequisiteError(
                "sandmill: needs Inspect's asyncio backend (INSPECT_ASYNC_BACKEND=asyncio)"
            ) from None
        wanted = config_of(config)
        try:
            probe = await cls.opened(wanted, {"task": task_name, "sample": "none: task_init"})
            await probe._box.kill()
        except SandmillError as error:
            raise PrerequisiteError(escape(f"sandmill: {error}")) from error

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """One sandbox, `default`. Raises SandmillError."""
        labels = {"task": task_name, "sample": str(metadata.get("__sample_id__", ""))}
        return {"default": await cls.opened(config_of(config), labels)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Ends the sample's sandboxes at once, also of an interrupted one: it takes milliseconds."""
        for environment in environments.values():
            await _end(environment.as_type(SandmillSandboxEnvironment)._box)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Nothing is left to end. With `cleanup` off it says what lives on, and for how long."""
        if cleanup:
            return
        if configured() is None:
            print("sandmill: the sandboxes end with this process, as its embedded server does")
            return
        for view in await AsyncSandbox.list(CLIENT | {"process": PROCESS}):
            lease_s = config_of(config).lease_s
            print(f"sandmill: {view.id} lives on for {lease_s:.0f} s without use; `sandmill shell {view.id}` enters it")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """`inspect sandbox cleanup sandmill [ID]`: ends what evals have left on the configured server."""
        if configured() is None:
            print("sandmill: no server is configured (SANDMILL_API_URL), and an embedded one leaves nothing")
            return
        try:
            views = [view for view in await AsyncSandbox.list(CLIENT) if id in (None, view.id)]
            if id is not None and not views:
                print(f"sandmill: no eval's sandbox is called {id}")
            for view in views:
                async with await AsyncSandbox.connect(view.id) as box:
                    await box.kill()
                print(f"sandmill: ended {view.id}")
        except SandmillError as error:
            raise PrerequisiteError(escape(f"sandmill: {error}")) from error


def config_of(config: SandboxEnvironmentConfigType | None) -> SandmillConfig:
    """The configuration in a model or a YAML file. Raises PrerequisiteError, with the place of the mistake."""
    if config is None:
        return SandmillConfig()
    if isinstance(config, SandmillConfig):
        return config
    if not isinstance(config, str):
        raise PrerequisiteError(
            f"sandmill: a {type(config).__name__} is no configuration of this sandbox; it takes a SandmillConfig or a YAML file"
        )
    try:
        found = yaml.safe_load(Path(config).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PrerequisiteError(escape(f"sandmill: {config} can't be read: {error}")) from error
    if not isinstance(found, dict | None):
        raise PrerequisiteError(escape(f"sandmill: {config} holds no fields; it looks like `memory_mb: 512`"))
    try:
        return SandmillConfig.model_validate(found or {})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise PrerequisiteError(escape(f"sandmill: {config}: {wrong}")) from error


async def _end(box: AsyncSandbox) -> None:
    """Ends a sandbox that is done with. Where that fails, its lease ends it; a sample's outcome is not changed by it."""
    try:
        await box.kill()
    except SandmillError as error:
        logger.warning("sandmill: %s was not ended, its lease will do that: %s", box.id, error)


def _subprocess_slot() -> Any:
    return concurrency("subprocesses", max_subprocesses_context_var.get(), resizable=True)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _seen_by_inspect(error: SandmillError) -> Exception:
    """The sandbox that ran out of memory is the model's doing; everything else is not, and stays what it is."""
    if isinstance(error, SandboxGoneError) and error.cause == "oom":
        return SandboxUnavailableError(str(error))
    return error


def _exit_code(result: Result) -> int:
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 9)


def _text(data: bytes, cut: tuple[int, int] | None) -> str:
    if cut is None:
        return data.decode(errors="replace")
    at, missing = cut
    first, last = data[:at].decode(errors="replace"), data[at:].decode(errors="replace")
    return f"{first}\n[{missing} bytes are missing here]\n{last}"


@contextmanager
def _faults_of(file: str) -> Iterator[None]:
    """Makes OSErrors of what sandboxd says is the path's fault."""
    try:
        yield
    except SandmillError as error:
        if (number := ERRNO_OF_CODE.get(error.code)) is not None:
            raise OSError(number, os.strerror(number), file) from error
        raise _seen_by_inspect(error) from error


def _checked(result: Result, file: str) -> bytes:
    """What a program that reads or writes a file for the user gave. Raises OSError with what it printed."""
    if result.ok:
        return result.stdout
    if result.exit_code == NOT_REGULAR:
        raise OSError(errno.EINVAL, "Not a regular file", file)
    said = (result.error_text.strip().splitlines() or [f"it ended with {_exit_code(result)}"])[-1]
    number = ERRNO_OF_TEXT.get(said.rpartition(": ")[2])
    raise OSError(number or errno.EIO, os.strerror(number) if number else said, file)

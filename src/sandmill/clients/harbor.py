"""Harbor's trials in Sandmill's sandboxes.

    harbor run --env sandmill.clients.harbor:SandmillEnvironment --path examples/tasks --agent oracle

Needs the package `harbor` (the extra of that name), so Python 3.12 or newer. The server is the one that SANDMILL_API_URL
and SANDMILL_API_KEY name; without them one is embedded in Harbor's process.

A task's environment is made as `sandmill eval` makes it: environment/prepare.toml, else the image that task.toml names, else
environment/Dockerfile.
Everything else is Harbor's to say: it decides about the network (public, unless a task says otherwise), limits, users and
timeouts. Errors of Sandmill pass through Harbor with their class, which it records beside a trial instead of a reward.
"""

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.models.trial.config import ResourceMode
from pydantic import Field

from sandmill.errors import (
    CommandTimeoutError,
    NotFoundError,
    SandboxGoneError,
    SandmillError,
    TransportError,
    UsageError,
)
from sandmill.rollouts.sdk_workshop import OUTPUT_LIMIT_BYTES, SdkBox, SdkWorkshop
from sandmill.sdk.asynchronous import AsyncSandbox
from sandmill.tasks.environment import read_environment
from sandmill.tasks.problems import Problems
from sandmill.wire import Result

PART_BYTES = 1 << 20
DOWNLOAD_LIMIT_BYTES = 1 << 30
"""Of one file or folder: a sandbox's sparse files must not fill the disk of the machine that asks for them."""


class SandmillOptions(EnvironmentOptions):
    """What `--ek KEY=VALUE` sets. The API key is no option: Harbor keeps options in its result files."""

    api_url: str | None = Field(default=None, description="Address of the server; default: SANDMILL_API_URL.")
    lease_s: float = Field(default=120.0, gt=0, description="Seconds a sandbox outlives a Harbor that died.")


class SandmillEnvironment(BaseEnvironment):
    """One trial's environment: one sandbox from `start` to `stop`."""

    options_model = SandmillOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments are Harbor's."""
        super().__init__(*args, **kwargs)
        self._running: AsyncSandbox | None = None
        self._broken: SandmillError | None = None

    @staticmethod
    def type() -> str:
        return "sandmill"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        """Nothing: Harbor ends the whole job for what is raised here; `start` fails this trial alone."""

    async def start(self, force_build: bool) -> None:
        """Prepares the environment, once for its content, and makes the sandbox. Cancelled: it is undone.

        `force_build` changes nothing: what is prepared is found by its content. Raises TaskError for an environment that
        can't be used, UsageError for mounts, PreparationError, ImageError, NodeError.
        """
        await self._end()
        if self._host_mounts:
            raise UsageError(
                "a sandbox has no mounts of the host", hint="leave --mounts out", code="mounts_unsupported"
            )
        problems = Problems()
        environment = read_environment(self.environment_dir, self.task_env_config.docker_image, problems)
        problems.raise_any()
        image = await SdkWorkshop(self.options.api_url).prepare(environment)
        self._running = await AsyncSandbox.create(
            image,
            network="none" if self._network_disabled else "all",
            cpu=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            memory_mb=self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT),
            disk_mb=self._effective_storage_mb,
            workdir=self.task_env_config.workdir or environment.workdir,
            user=environment.user,
            metadata={"harbor.session": self.session_id, "harbor.task": self.environment_name},
            lease_s=self.options.lease_s,
            api_url=self.options.api_url,
        )
        made = await self.ensure_dirs(self._mount_targets(writable_only=True))
        if made is not None and made.return_code != 0:
            raise SandmillError(f"Harbor's folders could not be made: {made.stderr}", code="start_failed")
        # As with Harbor's own images: a prepared or built environment has what it needs in it.
        if environment.dockerfile is None and not (self.environment_dir / "prepare.toml").is_file():
            await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Ends the sandbox. `delete=False` (Harbor's --no-delete) keeps its files as an image, which the log names."""
        if delete or self._running is None:
            await self._end()
            return
        sandbox, self._running = self._running, None
        try:
            image = await sandbox.commit()
        except SandmillError as error:
            # Its lease ends it; the trial's result stands.
            self.logger.warning(f"the sandbox could not be kept: {error}")
        else:
            self.logger.info(f"kept: sandmill run --image {image.id} -- bash")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a line of bash (of sh, where the image has none); of each stream up to 4 MiB are kept.

        Raises CommandTimeoutError after `timeout_sec` seconds (None: no limit): all that it started is ended then. What was
        ended by a signal, or for its memory, has the return code that a shell gives it: 128 + the signal's number.
        """
        emit = self._output_callback()
        stdout, stderr = _Teller(emit, "stdout"), _Teller(emit, "stderr")
        who = self._resolve_user(user)
        with self._sandbox() as sandbox:
            result = await sandbox.run(
                command,
                cwd=cwd,
                env=self._merge_env(env),
                user=None if who is None else str(who),
                timeout_s=timeout_sec,
                output_limit_bytes=OUTPUT_LIMIT_BYTES,
                on_stdout=stdout.take if emit else None,
                on_stderr=stderr.take if emit else None,
            )
        await stdout.finish()
        await stderr.finish()
        if result.reason == "timeout":
            raise CommandTimeoutError(f"the command ran into its timeout of {timeout_sec} s", result=result)
        return ExecResult(
            stdout=_text(result.stdout, result.stdout_cut),
            stderr=_text(result.stderr, result.stderr_cut) + _ending(result),
            return_code=_return_code(result),
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Root's, with its mode; missing folders are made."""
        source = Path(source_path)
        mode = (await asyncio.to_thread(source.stat)).st_mode & 0o777
        with self._sandbox() as sandbox:
            await sandbox.files.write(target_path, _parts(source), mode=mode, user="root")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Its content, root's, over what is there."""
        with self._sandbox() as sandbox:
            await SdkBox(sandbox).upload(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Raises NotFoundError, and UsageError for what isn't a file or is larger than 1 GiB."""
        target = Path(target_path)
        with self._sandbox() as sandbox:
            size = (await sandbox.files.stat(source_path, follow=True)).size_bytes
            if size > DOWNLOAD_LIMIT_BYTES:
                raise UsageError(f"{source_path} is larger than {DOWNLOAD_LIMIT_BYTES >> 20} MiB", code="too_large")
            part = await sandbox.files.read(source_path, offset=0, length=PART_BYTES)
            await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
            with await asyncio.to_thread(target.open, "wb") as local:
                await asyncio.to_thread(local.write, part)
                for offset in range(PART_BYTES, size, PART_BYTES):
                    part = await sandbox.files.read(source_path, offset=offset, length=PART_BYTES)
                    await asyncio.to_thread(local.write, part)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Its files and folders over what is there; links and devices stay behind. UsageError for more than 1 GiB."""
        with self._sandbox() as sandbox:
            await SdkBox(sandbox).download(source_dir, Path(target_dir), limit_bytes=DOWNLOAD_LIMIT_BYTES)

    @contextmanager
    def _sandbox(self) -> Iterator[AsyncSandbox]:
        """The sandbox for one call.

        Harbor goes on to grade after an agent's error. So once the infrastructure has failed, every further call fails
        with the same error: what the agent could not do must not become a reward.
        """
        if self._running is None:
            raise UsageError("this environment is not running", hint="await start() first", code="not_started")
        if self._broken is not None:
            raise self._broken
        try:
            yield self._running
        except SandmillError as error:
            if isinstance(error, TransportError | SandboxGoneError) or error.code == "internal":
                self._broken = error
            raise

    async def _end(self) -> None:
        sandbox, self._running, self._broken = self._running, None, None
        if sandbox is not None:
            try:
                await sandbox.kill()
            except (NotFoundError, SandboxGoneError):
                pass


class _Teller:
    """One stream's pieces for Harbor, as text: a character that is split over two of them is told whole."""

    def __init__(self, emit: Callable[[str, str], Awaitable[None]] | None, stream: str) -> None:
        self._emit = emit
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def take(self, data: bytes) -> None:
        await self._tell(self._decoder.decode(data))

    async def finish(self) -> None:
        await self._tell(self._decoder.decode(b"", final=True))

    async def _tell(self, text: str) -> None:
        if text and self._emit is not None:
            await self._emit(text, self._stream)


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as local:
        while part := local.read(PART_BYTES):
            yield part


def _text(data: bytes, cut: tuple[int, int] | None) -> str:
    """Harbor's result has no place for what is missing, so the text says it."""
    if cut is None:
        return data.decode(errors="replace")
    at, missing = cut
    return f"{data[:at].decode(errors='replace')}\n[{missing} bytes left out]\n{data[at:].decode(errors='replace')}"


def _ending(result: Result) -> str:
    return "\n[ended: out of memory]\n" if result.reason == "oom" else ""


def _return_code(result: Result) -> int:
    if result.exit_code is not None:
        return result.exit_code
    return 128 + (9 if result.signal is None else result.signal)

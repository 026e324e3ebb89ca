"""Sandboxes through the SDK: of a configured server, or of the embedded one."""

import asyncio
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from sandmill.errors import NotFoundError, SandboxGoneError, SandmillError, UsageError
from sandmill.rollouts.attempt import to_its_end
from sandmill.rollouts.workshop import BoxSpec
from sandmill.sdk.archive import tar_of
from sandmill.sdk.asynchronous import AsyncSandbox
from sandmill.sdk.offload import offload
from sandmill.sdk.sandbox import control_for
from sandmill.tasks import Environment
from sandmill.tasks.preparation import request_of
from sandmill.wire import Result, Usage

DOWNLOAD_LIMIT_BYTES = 64 * 1024 * 1024
OUTPUT_LIMIT_BYTES = 4 * 1024 * 1024


class SdkBox:
    """`Box` on an AsyncSandbox."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        return self._sandbox.id

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        return await self._sandbox.run(
            command,
            env=dict(env) if env else None,
            user=user,
            timeout_s=timeout_s,
            output_limit_bytes=OUTPUT_LIMIT_BYTES,
        )

    async def read(self, path: str) -> bytes:
        return await self._sandbox.files.read(path, length=DOWNLOAD_LIMIT_BYTES)

    async def write(self, path: str, data: bytes) -> None:
        await self._sandbox.files.write(path, data)

    async def upload(self, folder: Path, path: str) -> None:
        await self._sandbox.files.write_tar(path, tar_of(folder), user="root")

    async def download(self, path: str, folder: Path, limit_bytes: int = DOWNLOAD_LIMIT_BYTES) -> None:
        """At most `limit_bytes` of tar (default 64 MiB); raises UsageError (`too_large`) for more.

        What is unpacked stays within `folder`.
        """
        with tempfile.TemporaryFile() as spool:
            size = 0
            async with self._sandbox.files.read_tar(path) as parts:
                async for part in parts:
                    size += len(part)
                    if size > limit_bytes:
                        raise UsageError(f"{path} holds more than {limit_bytes >> 20} MiB", code="too_large")
                    spool.write(part)
            spool.seek(0)
            await asyncio.to_thread(_unpack, spool, folder)

    async def usage(self) -> Usage:
        return await self._sandbox.usage()

    async def commit(self) -> str:
        return (await self._sandbox.commit()).id

    async def kill(self) -> None:
        try:
            await self._sandbox.kill()
        except (NotFoundError, SandboxGoneError):
            pass


class SdkWorkshop:
    """`Workshop` on the SDK. `api_url` and `api_key` default to the environment; without a server one is embedded."""

    def __init__(self, api_url: str | None = None, api_key: str | None = None) -> None:
        self._api_url = api_url
        self._api_key = api_key

    async def prepare(self, environment: Environment) -> str:
        if environment.dockerfile is None:
            return await offload(self._prepare, environment)
        unwanted = threading.Event()
        try:
            return await offload(self._build, environment.dockerfile, unwanted)
        except asyncio.CancelledError:
            unwanted.set()
            raise

    def _prepare(self, environment: Environment) -> str:
        body = request_of(environment)
        return control_for(self._api_url, self._api_key).prepare(body).image

    def _build(self, file: Path, unwanted: threading.Event) -> str:
        from sandmill.builds import build

        return build(file.parent, file, cancelled=unwanted, api_url=self._api_url, api_key=self._api_key).image

    async def create(self, spec: BoxSpec) -> SdkBox:
        making = asyncio.ensure_future(self._create(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # It is made to its end, and then ended: who cancels an attempt finds nothing of it left.
            await to_its_end(_undo(making))
            raise

    async def _create(self, spec: BoxSpec) -> SdkBox:
        sandbox = await AsyncSandbox.create(
            image=spec.image,
            network=spec.network,
            cpu=spec.cpu,
            memory_mb=spec.memory_mb,
            disk_mb=spec.disk_mb,
            env=dict(spec.env),
            workdir=spec.workdir,
            user=spec.user,
            metadata=dict(spec.metadata),
            lease_s=spec.lease_s,
            api_url=self._api_url,
            api_key=self._api_key,
        )
        return SdkBox(sandbox)

    async def discard(self, image: str) -> None:
        try:
            await offload(lambda: control_for(self._api_url, self._api_key).remove_image(image))
        except NotFoundError:
            pass


async def _undo(making: "asyncio.Future[SdkBox]") -> None:
    try:
        await (await making).kill()
    except SandmillError:
        pass  # it was not made, or its lease ends it


def _unpack(archive: IO[bytes], folder: Path) -> None:
    """Files and directories only: an attempt's links and devices have no business on the host."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as members:
            for member in members:
                if member.isreg() or member.isdir():
                    members.extract(member, folder, set_attrs=False, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise SandmillError(f"the logs could not be unpacked: {error}", code="logs_unreadable") from error

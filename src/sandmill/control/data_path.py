"""The data path of a sandbox for serve's own needs (preparations): straight to sandboxd through noded's gateway."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from sandmill.control.sandboxes import Sandboxes, View
from sandmill.errors import NotFoundError, SandboxGoneError, SandmillError
from sandmill.sdk import calls, http1
from sandmill.sdk.asynchronous import AsyncChannel
from sandmill.sdk.filecalls import target
from sandmill.wire import Exec, Result

PART_BYTES = 1024 * 1024


class DataPath:
    """Implements `environments.StepIO` over a channel."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel

    async def run(self, command: Exec) -> Result:
        return await self._channel.call(calls.exec_(command), command.timeout_s)

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> None:
        where = target("files", path, mode=None if mode is None else f"{mode:o}", user=user, parents=1)
        await self._channel.call(calls.Call(http1.request("PUT", where, calls.RAW, data), type(None), True))

    async def write_tar(self, path: str, data: bytes, *, user: str | None = None) -> None:
        parts = (data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES))
        await self._channel.upload(target("tar", path, user=user), parts)


def opener(sandboxes: Sandboxes, data_url: str) -> Callable[[View], AbstractAsyncContextManager[DataPath]]:
    """What opens the data path of a sandbox of ours."""

    @asynccontextmanager
    async def open_io(view: View) -> AsyncIterator[DataPath]:
        async def why_gone() -> Any:
            try:
                await sandboxes.get(view.record.id)
            except (SandboxGoneError, NotFoundError) as error:
                return error
            except SandmillError:
                return None
            return None

        channel = AsyncChannel(data_url, view.record.id, view.record.token, why_gone)
        try:
            yield DataPath(channel)
        finally:
            channel.close()

    return open_io

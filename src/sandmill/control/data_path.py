"""The data path of a sandbox for serve's own needs (preparations): straight to sandboxd through noded's gateway."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from sandmill.backends.node import NodeIO
from sandmill.control.sandboxes import Sandboxes, View


def opener(sandboxes: Sandboxes, data_url: str) -> Callable[[View], AbstractAsyncContextManager[NodeIO]]:
    """What opens the data path of a sandbox of ours."""

    @asynccontextmanager
    async def open_io(view: View) -> AsyncIterator[NodeIO]:
        record = view.record
        io = NodeIO(data_url, record.id, record.token, partial(sandboxes.get, record.id))
        try:
            yield io
        finally:
            await io.close()

    return open_io

"""A control API over the fake backend: requests go straight to the application, no socket in between."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sandmill.backends.fake import FakeBackend, FakeIO
from sandmill.control.app import App
from sandmill.control.environments import Environments
from sandmill.control.http import Answer, Request
from sandmill.control.sandboxes import Sandboxes, View
from sandmill.control.store import MemoryStore
from sandmill.errors import NotFoundError
from sandmill.sdk.filecalls import Entry
from sandmill.wire import Exec, Result

KEY = "e2b_" + "0" * 40
DATA_URL = "http://127.0.0.1:49983"


class FakeNode(FakeBackend):
    """The fake backend as a node."""

    async def health(self) -> dict[str, Any]:
        return {"version": "fake", "sandboxes": len(self._boxes)}

    async def doctor(self) -> dict[str, Any]:
        return {"checks": []}


class FakeStepIO(FakeIO):
    async def run_live(self, command: Exec, say: Callable[[bytes], object]) -> Result:
        result = await self.run(command)
        say(result.stdout + result.stderr)
        return result

    async def write_tar(self, path: str, data: Any, *, user: str | None = None, keep_owners: bool = False) -> None:
        await self.write(f"{path.rstrip('/')}/from.tar", data, user=user)

    def read_tar(self, path: str) -> Any:
        raise NotImplementedError

    async def stat(self, path: str) -> Entry:
        raise NotFoundError(path)

    async def make_directory(self, path: str, *, user: str | None = None) -> None:
        await self.write(f"{path.rstrip('/')}/.made", b"", user=user)


@dataclass
class World:
    """Everything behind the API, and a way to call it."""

    node: FakeNode
    store: MemoryStore
    sandboxes: Sandboxes
    environments: Environments
    app: App

    async def answer(self, method: str, target: str, body: object = None, **headers: str) -> Answer:
        path, _, query = target.partition("?")
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        request = Request(method, path, query, {b"x-api-key": KEY.encode(), **named}, True)
        request.body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.app.answer(request)

    async def call(self, method: str, target: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status and decoded body."""
        answer = await self.answer(method, target, body, **headers)
        return answer.status, json.loads(answer.body) if answer.body else None


@asynccontextmanager
async def running(node: FakeNode, store: MemoryStore) -> AsyncIterator[World]:
    sandboxes = Sandboxes(node, store, now=lambda: node.now)

    @asynccontextmanager
    async def open_io(view: View) -> AsyncIterator[FakeStepIO]:
        yield FakeStepIO(node, view.record.id)

    environments = Environments(sandboxes, node, open_io)
    await sandboxes.start()
    try:
        yield World(node, store, sandboxes, environments, App(sandboxes, environments, node, KEY, data_url=DATA_URL))
    finally:
        await environments.close()
        await sandboxes.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(FakeNode(registry=("tool:1",)), MemoryStore()) as made:
        yield made

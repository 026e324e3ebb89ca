"""The node backend passes the same conformance suite as the fake, on real namespaces, and all of it."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from sandmill.backends import conformance
from sandmill.backends.base import Backend, SandboxIO
from sandmill.backends.node import NodeBackend, Noded, NodeIO

# Checks that fail, each with why; an entry that starts to pass fails the test.
KNOWN_FAILURES: dict[str, str] = {}


class NodeSubject:
    capabilities = conformance.CAPABILITIES

    def __init__(self, noded: Noded) -> None:
        self.backend: NodeBackend = noded.backend
        self._data_url = f"http://{noded.data_addr}"

    async def io(self, sandbox_id: str, token: str) -> SandboxIO:
        return NodeIO(self._data_url, sandbox_id, token, partial(self.backend.get, sandbox_id))

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[NodeSubject]:
    noded = Noded(tmp_path, "127.0.0.1:0")
    await noded.start()
    try:
        yield NodeSubject(noded)
    finally:
        await noded.stop(keep_sandboxes=False)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: conformance.Check, subject: NodeSubject) -> None:
    if check.__name__ not in KNOWN_FAILURES:
        await conformance.run(check, subject)
        return
    with pytest.raises(Exception):  # noqa: B017, PT011
        await conformance.run(check, subject)


def test_it_is_a_backend(tmp_path: Path) -> None:
    assert isinstance(NodeBackend(tmp_path / "noded.sock"), Backend)

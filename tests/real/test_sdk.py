"""The SDK's promises that need a real server."""

import asyncio
import time

import pytest

from sandmill import AsyncSandbox, Sandbox
from sandmill.sdk.sandbox import Views

from .conftest import Server

LINES = "for i in $(seq 300000); do echo $i; done; echo end >&2"
LIMIT_BYTES = 4096


def test_live_output_is_heard_whole_and_kept_bounded(server: Server) -> None:
    heard = bytearray()
    with Sandbox(api_url=server.api_url, api_key=server.api_key) as box:
        result = box.run(LINES, on_stdout=heard.extend, output_limit_bytes=LIMIT_BYTES)
    assert heard == b"".join(b"%d\n" % i for i in range(1, 300001))
    assert result.stdout_cut == (LIMIT_BYTES // 2, len(heard) - LIMIT_BYTES)
    assert result.stdout == heard[: LIMIT_BYTES // 2] + heard[-LIMIT_BYTES // 2 :]
    assert (result.stderr, result.stderr_cut) == (b"end\n", None)


def test_a_listener_that_fails_ends_the_command(server: Server) -> None:
    async def main() -> None:
        async def listen(data: bytes) -> None:
            raise LookupError(data)

        async with await AsyncSandbox.create(api_url=server.api_url, api_key=server.api_key) as box:
            with pytest.raises(LookupError):
                await box.run("echo a; sleep 1000", on_stdout=listen)
            assert b"sleep 1000" not in (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.replace(
                b"cat /proc", b""
            )

    asyncio.run(main())


def test_cancelled_creates_leave_nothing(server: Server) -> None:
    def living() -> Views:
        return Sandbox.list({"test": "cancelled"}, api_url=server.api_url, api_key=server.api_key)

    async def main() -> None:
        creates = [
            asyncio.ensure_future(
                AsyncSandbox.create(metadata={"test": "cancelled"}, api_url=server.api_url, api_key=server.api_key)
            )
            for _ in range(20)
        ]
        await asyncio.wait(creates, return_when=asyncio.FIRST_COMPLETED)
        for create in creates:
            create.cancel()
        for end in await asyncio.gather(*creates, return_exceptions=True):
            if isinstance(end, AsyncSandbox):
                await end.kill()

    asyncio.run(main())
    give_up = time.monotonic() + 30
    while living():
        assert time.monotonic() < give_up, living()
        time.sleep(0.05)

"""A sandbox that dies under a command says why, at once and for good: never a bare broken connection, never a wrong cause."""

import json
import os
import signal
import threading
import time

import pytest

from sandmill import AsyncSandbox, Sandbox, SandboxGoneError

from .conftest import Server

pytestmark = pytest.mark.usefixtures("client_environment")

TIMES = 10


def kill_pid_1(server: Server, sandbox_id: str) -> None:
    """Ends the sandbox's sandboxd from outside, as the machine's OOM killer could."""
    record = json.loads((server.state_dir / "sandboxes" / sandbox_id / "state.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)


def later(seconds: float, server: Server, sandbox_id: str) -> threading.Thread:
    def wait_and_kill() -> None:
        time.sleep(seconds)
        kill_pid_1(server, sandbox_id)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


def test_a_death_under_a_command_has_its_cause(client_environment: Server) -> None:
    for _ in range(TIMES):
        box = Sandbox()
        killer = later(0.05, client_environment, box.id)
        with pytest.raises(SandboxGoneError) as caught:
            box.run("sleep 5")
        killer.join()
        assert caught.value.cause == "crashed"
        with pytest.raises(SandboxGoneError) as again:
            Sandbox.connect(box.id)
        assert again.value.cause == "crashed"
        box.close()


async def test_a_death_under_an_asyncio_command_has_its_cause(client_environment: Server) -> None:
    for _ in range(TIMES):
        box = await AsyncSandbox.create()
        killer = later(0.05, client_environment, box.id)
        with pytest.raises(SandboxGoneError) as caught:
            await box.run("sleep 5")
        killer.join()
        assert caught.value.cause == "crashed"
        assert not await box.kill()

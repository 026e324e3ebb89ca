"""A real server for the tests that need one: its own state directory, free ports, nothing shared with another."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandmill.sdk.control import close_all


@dataclass
class Server:
    """A running `sandmill serve`."""

    process: subprocess.Popen[str]
    state_dir: Path
    api_url: str
    data_url: str
    api_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment for clients in other processes."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SANDMILL_API", "E2B_"))}
        return clean | {"SANDMILL_API_URL": self.api_url, "SANDMILL_API_KEY": self.api_key}

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        status = self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def start_server(state_dir: Path, *arguments: str) -> Server:
    """Starts a server on `state_dir` and waits until it is ready; fails the test with its output if it isn't."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SANDMILL_API", "E2B_"))}
    command = [sys.executable, "-m", "sandmill.cli", "serve", "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--state-dir", str(state_dir), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"ready api=(\S+) data=(\S+)", line)
    if not found:
        process.kill()
        pytest.fail(f"the server did not come up; it said {line!r}")
    return Server(process, state_dir, found[1], found[2], (state_dir / "api-key").read_text().strip())


def claimed(state_dir: Path) -> set[str]:
    """Ids of the sandboxes that somebody asked for: the directories but for those of the warm pool."""
    return {entry.name for entry in (state_dir / "sandboxes").iterdir() if not entry.name.startswith("warm-")}


@contextmanager
def temporary_server(*arguments: str) -> Iterator[Server]:
    """A server for one block; stopped with SIGTERM at its end."""
    with tempfile.TemporaryDirectory(prefix="sandmill-test-") as folder:
        server = start_server(Path(folder), *arguments)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(autouse=True)
def no_idle_connections() -> Iterator[None]:
    """The SDK keeps a connection to each server of a process; here servers come and go."""
    yield
    close_all()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for the tests that only use it; those that stop or kill one start their own."""
    with temporary_server() as running:
        yield running


@pytest.fixture
def client_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Points this process's SDK at the shared server."""
    monkeypatch.setenv("SANDMILL_API_URL", server.api_url)
    monkeypatch.setenv("SANDMILL_API_KEY", server.api_key)
    return server

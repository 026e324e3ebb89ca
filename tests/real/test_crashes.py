"""kill -9 of serve, noded and a client at random points: nothing lost that should live, nothing left that should not."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandmill import Sandbox, SandmillError

from .conftest import Server, claimed, start_server
from .test_leaks import noded_pid, nodes, sandbox_cgroups

ROUNDS = 10
LEASE_S = 6.0
"""Lease of what the killed clients made: short, so that the test can wait for it."""
SEED = int(os.environ.get("SANDMILL_SEED", "20261201"))

CLIENT = f"""
import itertools, sys
from sandmill import Sandbox, SandmillError
for n in itertools.count():
    try:
        box = Sandbox(lease_s={LEASE_S}, metadata={{"by": "churn"}})
        print(box.id, flush=True)
        box.run(["/bin/sh", "-c", "echo hello > /tmp/f; sleep 0.05"])
        if n % 2:
            box.kill()
    except SandmillError as error:
        print(f"# {{type(error).__name__}}: {{error}}", file=sys.stderr, flush=True)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Machine:
    """A server on ports that stay the same when it is started again."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.ports = (free_port(), free_port())
        self.server = self.start()

    def start(self) -> Server:
        api, data = (f"127.0.0.1:{port}" for port in self.ports)
        return start_server(self.state_dir, "--listen", api, "--data-listen", data)

    def kill_serve(self) -> None:
        self.server.stop(signal.SIGKILL)
        self.server = self.start()

    def kill_noded(self) -> None:
        os.kill(noded_pid(self.state_dir), signal.SIGKILL)

    def kill_both(self) -> None:
        os.kill(noded_pid(self.state_dir), signal.SIGKILL)
        self.kill_serve()


@contextmanager
def churning(server: Server) -> Iterator[subprocess.Popen[str]]:
    """A client that creates and kills all the time, until the block ends or someone kills it."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=server.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield client
    finally:
        client.kill()
        client.wait(10)


def test_kill_at_random_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED} (SANDMILL_SEED sets it)")
    others = nodes()
    machine = Machine(tmp_path / "state")
    try:
        monkeypatch.setenv("SANDMILL_API_URL", machine.server.api_url)
        monkeypatch.setenv("SANDMILL_API_KEY", machine.server.api_key)
        lasting = [Sandbox(lease_s=600, metadata={"by": "test"}) for _ in range(4)]
        for number, box in enumerate(lasting):
            box.files.write("/tmp/number", str(number).encode())
            box.start(["/bin/sleep", "1000"])
        victims = [machine.kill_serve, machine.kill_noded, machine.kill_both]
        for round_number in range(ROUNDS):
            with churning(machine.server) as client:
                time.sleep(chance.uniform(0.1, 0.8))
                victim = victims[round_number % len(victims)]
                victim()
                time.sleep(chance.uniform(0.0, 0.3))
                client.kill()
            for number, box in enumerate(lasting):
                assert answer(box, number) == str(number).encode(), f"after {victim.__name__}, round {round_number}"
                assert any(proc.argv[:1] == ["/bin/sleep"] for proc in box.processes()), "a process was lost"

        ids = {box.id for box in lasting}
        deadline = time.monotonic() + LEASE_S * 3 + 5
        while {box.id for box in Sandbox.list()} != ids and time.monotonic() < deadline:
            time.sleep(0.3)
        assert {box.id for box in Sandbox.list()} == ids, "killed clients' sandboxes outlive their lease"
        assert claimed(machine.state_dir) == ids
        for box in lasting:
            box.kill()
        assert claimed(machine.state_dir) == set()
    finally:
        machine.server.stop()
    assert list((machine.state_dir / "sandboxes").iterdir()) == []
    assert not processes_of(machine.state_dir)
    assert sandbox_cgroups(others) == 0


def answer(box: Sandbox, number: int) -> bytes:
    """What the sandbox says within ten seconds; a daemon that was just killed may refuse for a moment, retryably."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return box.run(["/bin/cat", "/tmp/number"]).stdout
        except SandmillError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise AssertionError(f"sandbox {number} is lost: {error}") from error
            time.sleep(0.05)


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of daemons that still run for this state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(state_dir) in line and entry.name.isdigit() and int(entry.name) != os.getpid():
            found.append(line)
    return found


def test_a_killed_client_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded server dies with its process, also by SIGKILL, and takes every sandbox along."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDMILL_API")}
    environment["TMPDIR"] = str(tmp_path)
    code = (
        "import json, sys, time; from sandmill import Sandbox; box = Sandbox()\n"
        "print(json.dumps({'id': box.id, 'out': box.run(['/bin/echo', 'up']).stdout.decode()}), flush=True)\n"
        "time.sleep(600)"
    )
    others = nodes()
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert json.loads(client.stdout.readline())["out"] == "up\n"
        client.kill()
    deadline = time.monotonic() + 15
    while (processes_of(tmp_path) or any(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert sandbox_cgroups(others) == 0

"""The life of `sandmill serve`: stops, kills, restarts, neighbours; what lives on and what doesn't."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill import Sandbox, SandboxGoneError, SandmillError
from sandmill.sdk.configuration import Server as Address
from sandmill.sdk.control import Control
from sandmill.wire import CreateSandbox

from .conftest import Server, claimed, start_server
from .test_leaks import noded_pid, nodes, sandbox_cgroups


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sandmill-test-") as folder:
        yield Path(folder)


def client(server: Server) -> dict[str, str]:
    return {"api_url": server.api_url, "api_key": server.api_key}


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of daemons that run for this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and int(entry.name) != os.getpid() and str(state_dir) in line:
            found.append(line)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_named(pid: int, name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        after = stat.rsplit(")", 1)[1].split()
        if stat[stat.index("(") + 1 : stat.rindex(")")] == name and int(after[1]) == pid:
            found.append(int(entry.name))
    return found


def wait_until(condition: object, within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def command(state_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "sandmill.cli", "serve", "--state-dir", str(state_dir), *words]


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SANDMILL_API", "E2B_"))}


def test_sigterm_leaves_nothing(state_dir: Path) -> None:
    others = nodes()
    server = start_server(state_dir)
    assert json.loads((state_dir / "serve.json").read_text())["pid"] == server.process.pid
    assert (state_dir / "api-key").stat().st_mode & 0o777 == 0o600
    boxes = [Sandbox(**client(server)) for _ in range(3)]
    boxes[0].start(["/bin/sleep", "1000"])
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 5
    assert processes_of(state_dir) == []
    assert not (state_dir / "serve.json").exists()
    assert list((state_dir / "sandboxes").iterdir()) == []
    assert sandbox_cgroups(others) == 0
    for box in boxes:
        box.close()


def test_a_stopped_server_remembers_what_ended(state_dir: Path) -> None:
    server = start_server(state_dir)
    box = Sandbox(**client(server))
    box.close()
    server.stop()
    server = start_server(state_dir)
    try:
        with pytest.raises(SandboxGoneError) as gone:
            Sandbox.connect(box.id, **client(server))
        assert gone.value.cause == "killed"
    finally:
        server.stop()


def test_kept_sandboxes_are_there_for_the_next(state_dir: Path) -> None:
    server = start_server(state_dir, "--keep-sandboxes")
    box = Sandbox(metadata={"a": "b"}, **client(server))
    box.close()
    kept = Sandbox.connect(box.id, **client(server))
    kept.files.write("/tmp/x", "kept")
    kept.close()
    assert server.stop() == 0
    assert processes_of(state_dir) == []
    server = start_server(state_dir)
    try:
        again = Sandbox.connect(box.id, **client(server))
        assert again.info.metadata == {"a": "b"}
        assert again.files.read("/tmp/x") == b"kept"
        again.close()
    finally:
        server.stop()


def test_sandboxes_outlive_a_killed_server(state_dir: Path) -> None:
    server = start_server(state_dir)
    box = Sandbox(lease_s=600, metadata={"a": "b"}, **client(server))
    process = box.start(["/bin/sh", "-c", "sleep 1000"])
    key, noded = server.api_key, noded_pid(state_dir)
    server.stop(signal.SIGKILL)
    assert alive(noded)
    assert box.run(["/bin/echo", "no server needed"]).stdout == b"no server needed\n"
    server = start_server(state_dir)
    try:
        assert server.api_key == key
        assert noded_pid(state_dir) == noded
        again = Sandbox.connect(box.id, **client(server))
        assert again.info.metadata == {"a": "b"}
        assert process.pid in [proc.pid for proc in again.processes() if proc.running]
        again.close()
        # The adopted noded is watched, too.
        os.kill(noded, signal.SIGKILL)
        again = Sandbox.connect(box.id, **client(server))
        assert again.run(["/bin/echo", "up"]).stdout == b"up\n"
        again.close()
    finally:
        box.close()
        server.stop()
    assert processes_of(state_dir) == []


def test_a_killed_noded_is_back_at_once(state_dir: Path) -> None:
    """Requests meanwhile wait; the data address stays."""
    server = start_server(state_dir)
    try:
        box = Sandbox(lease_s=600, **client(server))
        box.files.write("/tmp/x", "here")
        for _ in range(3):
            before = noded_pid(state_dir)
            os.kill(before, signal.SIGKILL)
            began = time.monotonic()
            with Sandbox(**client(server)) as other:
                assert other.run(["/bin/echo", "up"]).stdout == b"up\n"
            assert time.monotonic() - began < 5
            assert noded_pid(state_dir) != before
            again = Sandbox.connect(box.id, **client(server))
            assert again.info.data_url == server.data_url
            assert again.files.read("/tmp/x") == b"here"
            again.close()
        box.kill()
    finally:
        server.stop()


def test_many_creates_across_a_kill_of_noded(state_dir: Path) -> None:
    """None fails, none is lost, none is doubled."""
    server = start_server(state_dir)
    boxes: list[Sandbox] = []
    failures: list[SandmillError] = []

    def create() -> None:
        try:
            boxes.extend(Sandbox(lease_s=600, **client(server)) for _ in range(10))
        except SandmillError as error:
            failures.append(error)

    try:
        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.15)
            before = noded_pid(state_dir)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: noded_pid(state_dir) != before)
        for thread in threads:
            thread.join(60)
        assert failures == []
        ids = {box.id for box in boxes}
        assert len(ids) == 40
        wait_until(lambda: {view.id for view in Sandbox.list(**client(server))} == ids)
        assert claimed(state_dir) == ids
    finally:
        for box in boxes:
            box.close()
        server.stop()


def test_a_client_killed_in_the_middle_of_a_create(state_dir: Path) -> None:
    """Without an idempotency key the create is undone: nobody knows of it."""
    server = start_server(state_dir)
    try:
        host, port = server.api_url.removeprefix("http://").split(":")
        for wait_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
            for _ in range(5):
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(
                        f"POST /v1/sandboxes HTTP/1.1\r\nHost: h\r\nX-API-Key: {server.api_key}\r\n"
                        "Content-Length: 2\r\n\r\n{}".encode()
                    )
                    time.sleep(wait_s)
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, as a killed one
        wait_until(lambda: not Sandbox.list(**client(server)) and not claimed(state_dir))
    finally:
        server.stop()


def test_the_same_key_from_many_at_once(state_dir: Path) -> None:
    server = start_server(state_dir)
    try:
        found: list[str] = []

        def create() -> None:
            control = Control(Address(server.api_url, server.api_key))
            found.append(control.create(CreateSandbox(), "the-key").id)
            control.close()

        threads = [threading.Thread(target=create) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 12
        assert len(set(found)) == 1
        assert len(Sandbox.list(**client(server))) == 1
    finally:
        server.stop()


def test_neighbours_do_not_disturb_each_other(state_dir: Path) -> None:
    one, two = start_server(state_dir / "one"), start_server(state_dir / "two")
    try:
        assert one.api_key != two.api_key
        first, second = Sandbox(**client(one)), Sandbox(**client(two))
        assert [view.id for view in Sandbox.list(**client(one))] == [first.id]
        with pytest.raises(SandmillError, match="wrong"):
            Sandbox.list(api_url=one.api_url, api_key=two.api_key)
        first.close()
        one.stop()
        assert second.run(["/bin/echo", "alive"]).stdout == b"alive\n"
        second.kill()
    finally:
        one.stop()
        two.stop()


def test_the_same_directory_twice_is_an_error(state_dir: Path) -> None:
    server = start_server(state_dir)
    try:
        words = command(state_dir, "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0")
        second = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30, env=clean_environment())
        assert second.returncode not in (0, None)
        assert f"process {server.process.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert Sandbox.list(**client(server)) == []
    finally:
        server.stop()


@pytest.mark.parametrize("option", ["--listen", "--data-listen"])
def test_a_taken_port_is_an_error_that_says_what_to_do(state_dir: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        other = "--data-listen" if option == "--listen" else "--listen"
        words = command(state_dir, option, place, other, "127.0.0.1:0")
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode not in (0, None)
    assert done.stdout == ""
    assert "in use" in done.stderr
    assert option in done.stderr
    assert "Traceback" not in done.stderr
    assert processes_of(state_dir) == []


def test_an_embedded_server_goes_with_its_parent(tmp_path: Path) -> None:
    """Both ways: stopped at the parent's end, and when the parent is killed."""
    others = nodes()
    code = "import time; from sandmill import Sandbox; box = Sandbox(); print(box.id, flush=True)\n"
    for ending, expected in (("", 0), ("time.sleep(600)", -signal.SIGKILL)):
        environment = clean_environment() | {"TMPDIR": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-c", code + ending], env=environment, stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline().startswith("i")
            if ending:
                parent.kill()
            assert parent.wait(30) == expected
        wait_until(lambda: not processes_of(tmp_path) and not list(tmp_path.iterdir()))
    assert sandbox_cgroups(others) == 0


def test_a_killed_embedded_server_leaves_nothing(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    code = "import sys; from sandmill import Sandbox; box = Sandbox(); print(box.id, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        parent.stdout.readline()
        (state,) = tmp_path.iterdir()
        os.kill(json.loads((state / "serve.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: not processes_of(state))
        parent.stdin.close()
        parent.wait(30)
    wait_until(lambda: not list(tmp_path.iterdir()))

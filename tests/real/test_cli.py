"""The command line as people use it: through a shell, against a running server and without one."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Server

SANDMILL = [sys.executable, "-m", "sandmill.cli"]


@pytest.fixture
def mill(server: Server) -> "Mill":
    return Mill(server.environment)


class Mill:
    """Runs `sandmill`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *words: str, stdin: bytes | None = None, **more: object) -> "subprocess.CompletedProcess[bytes]":
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*SANDMILL, *words], check=False, capture_output=True, timeout=60, env=self.environment, **given, **more
        )  # type: ignore[call-overload,no-any-return]

    def text(self, *words: str) -> str:
        done = self(*words)
        assert done.returncode == 0, done.stderr.decode()
        return str(done.stdout.decode().strip())


@pytest.fixture
def box(mill: Mill) -> Iterator[str]:
    made = mill.text("create")
    yield made
    mill("kill", made)


def said(done: "subprocess.CompletedProcess[bytes]") -> tuple[int, bytes, bytes]:
    return done.returncode, done.stdout, done.stderr


# run and exec


def test_run(mill: Mill) -> None:
    assert said(mill("run", "true")) == (0, b"", b"")
    assert said(mill("run", "echo out; echo err >&2; exit 3")) == (3, b"out\n", b"err\n")
    assert said(mill("run", "printf", "%s|", "a b", "$HOME", "*")) == (0, b"a b|$HOME|*|", b"")
    assert said(mill("run", "--", "printf", "x")) == (0, b"x", b"")
    assert said(mill("run", "printf '1\\0002'")) == (0, b"1\x002", b"")
    assert said(mill("run", "cat", stdin=b"\xff\x00in")) == (0, b"\xff\x00in", b"")
    assert (
        said(mill("run", "-e", "A=b c", "-u", "user", "-w", "/tmp", "echo $A; id -un; pwd"))[1] == b"b c\nuser\n/tmp\n"
    )
    assert json.loads(mill.text("ls", "--json")) == []


def test_run_ends_with_its_command(mill: Mill) -> None:
    assert mill("run", "kill -SEGV $$").returncode == 139
    done = mill("run", "--timeout", "0.5", "echo so far; sleep 1000")
    assert (done.returncode, done.stdout) == (124, b"so far\n")
    assert b"timeout" in done.stderr
    done = mill("run", "--memory-mb", "64", "python3 -c 'x = bytearray(1 << 30)'")
    assert done.returncode == 137
    assert b"out of memory" in done.stderr


def test_large_output_is_whole(mill: Mill) -> None:
    assert len(mill("run", "head -c 60000000 /dev/zero").stdout) == 60_000_000


def test_output_is_live(mill: Mill) -> None:
    with subprocess.Popen(
        [*SANDMILL, "run", "echo a; sleep 5"], stdout=subprocess.PIPE, env=mill.environment
    ) as running:
        assert running.stdout is not None
        began = time.monotonic()
        assert running.stdout.readline() == b"a\n"
        assert time.monotonic() - began < 4
        running.terminate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_started(mill: Mill, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*SANDMILL, "run", "echo up; sleep 1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=mill.environment
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"up\n"
        running.send_signal(number)
        assert running.wait(20) == 128 + number
        assert b"Traceback" not in running.stderr.read()
    assert json.loads(mill.text("ls", "--json")) == []


def test_a_closed_pipe_ends_what_was_started(mill: Mill) -> None:
    line = f"{' '.join(SANDMILL)} run yes | head -n 1"
    done = subprocess.run(line, shell=True, capture_output=True, timeout=60, env=mill.environment, check=True)
    assert (done.stdout, done.stderr) == (b"y\n", b"")
    assert json.loads(mill.text("ls", "--json")) == []


def test_run_as_json(mill: Mill) -> None:
    done = mill("run", "--json", "echo hi; exit 4")
    assert done.returncode == 4
    result = json.loads(done.stdout)
    assert (result["exit_code"], result["stdout"], result["reason"]) == (4, "hi\n", "exited")


def test_exec(mill: Mill, box: str) -> None:
    assert said(mill("exec", box, "echo kept > /tmp/x")) == (0, b"", b"")
    assert said(mill("exec", box[:8], "cat", "/tmp/x")) == (0, b"kept\n", b"")
    assert said(mill("exec", box, "cat", stdin=b"in")) == (0, b"in", b"")
    assert said(mill("exec", "--timeout", "0.3", box, "sleep 100"))[0] == 124
    assert said(mill("exec", "--user", "user", "--workdir", "/tmp", box, "id -un; pwd"))[1] == b"user\n/tmp\n"


def test_mistakes(mill: Mill, box: str) -> None:
    for words, code, message in (
        (["exec", box, "no-such-program"], 2, "no program"),
        (["exec", "--workdir", "/nope", box, "pwd"], 2, "/nope"),
        (["exec", "--user", "nobody-here", box, "pwd"], 2, "nobody-here"),
        (["exec", "i0000000000000000000", "true"], 1, "there is no sandbox"),
        (["run", "--image", "nope", "true"], 1, "nope"),
        (["inspect", "zzz"], 1, "zzz"),
        (["cp", "/nonexistent", f"{box}:/x"], 2, "/nonexistent"),
        (["cp", f"{box}:/nonexistent", "-"], 1, "nonexistent"),
        (["image", "rm", "nope"], 1, "nope"),
        (["shell", box], 2, "no terminal"),
    ):
        done = mill(*words)
        assert (done.returncode, done.stdout) == (code, b""), (words, done)
        text = done.stderr.decode()
        assert text.startswith("error: "), text
        assert message in text
        assert "Traceback" not in text


def test_a_gone_sandbox_is_no_exit_code_of_a_command(mill: Mill) -> None:
    box = mill.text("create")
    with subprocess.Popen(
        [*SANDMILL, "exec", box, "echo up; sleep 1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=mill.environment,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"up\n"
        mill.text("kill", box)
        assert running.wait(20) == 125
        assert b"killed" in running.stderr.read()
    assert mill("exec", box, "true").returncode == 125


# create, ls, inspect, kill


def test_manage(mill: Mill) -> None:
    one = mill.text("create", "--name", "builder", "--metadata", "job=17", "--memory-mb", "128", "--lease", "60")
    two = mill.text("create", "--metadata", "job=18")
    assert re.fullmatch("i[a-z0-9]{19}", one)
    assert {view["id"] for view in json.loads(mill.text("ls", "--json"))} == {one, two}
    assert mill.text("ls", "-q", "--metadata", "job=17") == one
    table = mill.text("ls")
    assert table.startswith("ID")
    assert "128 MiB" in table
    assert "builder job=17" in table
    shown = json.loads(mill.text("inspect", "builder"))
    assert (shown["id"], shown["limits"]["memory_bytes"], shown["metadata"]) == (one, 128 << 20, {"job": "17"})
    assert shown["usage"]["memory_bytes"] > 0
    assert mill.text("kill", "builder") == one
    done = mill("kill", one, two)
    assert (done.returncode, done.stdout.decode().strip()) == (1, two)
    assert mill("kill", "--all").returncode == 0
    assert mill.text("ls", "-q") == ""


# cp


def test_cp_keeps_what_a_tree_is(mill: Mill, box: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "s.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "s.sh").chmod(0o755)
    (tree / "d" / "secret").write_bytes(b"\xff\x00")
    (tree / "d" / "secret").chmod(0o600)
    (tree / "link").symlink_to("d")
    (tree / "loop").symlink_to("loop")
    (tree / "dangling").symlink_to("nowhere")
    mill.text("cp", str(tree), f"{box}:/app")
    assert mill.text("exec", box, "/app/s.sh") == "ran"
    assert mill.text("exec", box, "readlink /app/link /app/loop /app/dangling") == "d\nloop\nnowhere"
    mill.text("cp", str(tree), f"{box}:/app")
    assert mill.text("exec", box, "ls /app/tree/d") == "secret"
    mill.text("cp", f"{tree}/.", f"{box}:/flat")
    assert mill.text("exec", box, "stat -c %a /flat/d/secret") == "600"
    back = tmp_path / "back"
    mill.text("cp", f"{box}:/flat", str(back))

    def facts(root: Path) -> dict[str, object]:
        return {str(path.relative_to(root)): fact(path) for path in sorted(root.rglob("*"))}

    def fact(path: Path) -> object:
        if path.is_symlink():
            return path.readlink()
        return path.stat().st_mode, None if path.is_dir() else path.read_bytes()

    assert facts(back) == facts(tree)


def test_cp_files_and_streams(mill: Mill, box: str, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "in").write_bytes(data)
    mill.text("cp", str(tmp_path / "in"), f"{box}:/tmp/")
    mill.text("cp", f"{box}:/tmp/in", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == data
    assert mill("cp", f"{box}:/tmp/in", "-").stdout == data
    assert mill("cp", "-", f"{box}:/tmp/streamed", stdin=b"streamed").returncode == 0
    assert mill.text("exec", box, "cat /tmp/streamed") == "streamed"


# shell


def test_shell_is_a_terminal(mill: Mill, box: str) -> None:
    """With Ctrl-C and the size of ours; afterwards ours is as it was."""
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*SANDMILL, "shell", box], mill.environment)
    seen = bytearray()

    def expect(text: bytes, within_s: float = 15.0) -> None:
        deadline = time.monotonic() + within_s
        while text not in seen:
            ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; there was {bytes(seen)!r}"
            seen.extend(os.read(master, 65536))

    try:
        import fcntl
        import struct
        import termios

        os.write(master, b"echo $((40+2)); tty\n")
        expect(b"42")
        expect(b"/dev/pts/")
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        os.kill(pid, signal.SIGWINCH)
        time.sleep(0.3)
        os.write(master, b"stty size\n")
        expect(b"33 77")
        os.write(master, b"sleep 1000\n")
        time.sleep(0.3)
        os.write(master, b"\x03")
        os.write(master, b"echo code-$?\n")
        expect(b"code-130")
        os.write(master, b"exit 5\n")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        assert termios.tcgetattr(master)[3] & termios.ECHO
    finally:
        os.close(master)


# images, doctor, and no server


def test_images(mill: Mill) -> None:
    with tempfile.TemporaryDirectory(prefix="sandmill-test-") as folder:
        root = Path(folder) / "rootfs"
        (root / "etc").mkdir(parents=True)
        (root / "etc" / "hello").write_text("from the image")
        assert mill.text("image", "import", str(root), "--name", "tiny") == "tiny"
    try:
        assert "tiny" in mill.text("image", "ls")
        assert json.loads(mill.text("image", "inspect", "tiny"))["names"] == ["tiny"]
        box = mill.text("create", "--image", "tiny")
        assert mill("cp", f"{box}:/etc/hello", "-").stdout == b"from the image"
        assert b"error" in mill("image", "rm", "tiny").stderr
        mill.text("kill", box)
    finally:
        assert mill.text("image", "rm", "tiny") == "tiny"


def test_doctor(mill: Mill) -> None:
    done = mill("doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    assert len(checks) > 3
    assert all({"name", "status", "found", "needed", "fix"} <= set(check) for check in checks)
    assert done.returncode == (1 if any(check["status"] == "fail" for check in checks) else 0)


def test_run_without_a_server_has_one_of_its_own(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SANDMILL_API", "E2B_"))}
    mill = Mill(environment | {"TMPDIR": str(tmp_path)})
    done = mill("run", "echo hi; exit 6")
    assert said(done) == (6, b"hi\n", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_address_is_told(mill: Mill) -> None:
    wrong = Mill(mill.environment | {"SANDMILL_API_URL": "http://127.0.0.1:1"})
    done = wrong("ls")
    assert done.returncode == 125
    assert b"sandmill serve" in done.stderr

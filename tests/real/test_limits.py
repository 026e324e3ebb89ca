"""Limits hold, and reaching one is said as what it is, never as a bare exit code."""

import pytest

from sandmill import Sandbox

from .conftest import Server

pytestmark = pytest.mark.usefixtures("client_environment")

EAT = "import sys; data = bytearray(int(sys.argv[1]) << 20); print(len(data))"


def test_memory_is_limited_and_oom_is_said(client_environment: Server) -> None:
    with Sandbox(memory_mb=128) as box:
        assert box.run(["/usr/bin/python3", "-c", EAT, "32"]).exit_code == 0
        result = box.run(["/usr/bin/python3", "-c", EAT, "512"])
        assert result.reason == "oom"
        assert result.exit_code is None or result.exit_code != 0
        usage = box.usage()
        assert usage.oom_kills >= 1
        assert usage.memory_peak_bytes >= 100 << 20
        assert usage.memory_limit_bytes == 128 << 20
        assert box.run("echo alive").stdout == b"alive\n"


def test_limits_are_readable_inside() -> None:
    """Case 19: what `nproc` and /sys/fs/cgroup say is true."""
    with Sandbox(cpu=1, memory_mb=256) as box:
        assert box.run("nproc").stdout == b"1\n"
        assert box.run("python3 -c 'import os; print(len(os.sched_getaffinity(0)))'").stdout == b"1\n"
        lines = box.run("cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max").stdout.decode().split()
        quota, period, memory = (int(word) for word in lines)
        assert quota / period == 1
        assert memory == 256 << 20


def test_pids_are_limited() -> None:
    with Sandbox(pids=64) as box:
        result = box.run("for i in $(seq 200); do sleep 5 & done; wait", timeout_s=20)
        assert b"fork" in result.stderr.lower() or b"resource" in result.stderr.lower()
        assert box.run(["/bin/echo", "alive"]).stdout == b"alive\n"


def test_a_disk_limit_holds_and_says_what_enforces_it() -> None:
    with Sandbox(disk_mb=32) as box:
        assert box.info.limits.enforced_by["disk"] in ("btrfs-qgroup", "tmpfs")
        result = box.run("head -c 100000000 /dev/zero > /tmp/big; head -c 1000 /dev/zero > /tmp/x")
        assert b"No space left" in result.stderr or b"quota" in result.stderr.lower()
        usage = box.usage()
        assert usage.disk_limit_bytes == 32 << 20
        assert usage.disk_bytes <= 34 << 20
        box.run("rm /tmp/big")
        assert box.run("echo ok > /tmp/again; cat /tmp/again").stdout == b"ok\n"


def test_shared_memory_follows_the_memory_limit() -> None:
    """Case 22."""
    with Sandbox(memory_mb=512) as box:
        code = "from multiprocessing import Pool; print(sum(Pool(4).map(abs, range(9))))"
        assert box.run(["/usr/bin/python3", "-c", code], user="user").stdout == b"36\n"
        assert box.run("stat -c %a /dev/shm").stdout == b"1777\n"
        line = "dd if=/dev/zero of=/dev/shm/x bs=1M count=200 2>/dev/null; stat -c %s /dev/shm/x"
        assert box.run(line).stdout == b"209715200\n"


def test_a_timeout_ends_everything_and_returns_the_output() -> None:
    """Pain 2: also what called setsid or forked twice; what ran before on purpose lives on."""
    with Sandbox() as box:
        box.run("sleep 1000 & echo")
        result = box.run("echo so far; setsid sleep 2000 & (sleep 3000 &) ; sleep 4000", timeout_s=0.5)
        assert result.reason == "timeout"
        assert result.stdout == b"so far\n"
        alive = box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout.decode()
        assert "1000" in alive
        for gone in ("2000", "3000", "4000"):
            assert gone not in alive


def test_an_exec_returns_though_a_child_holds_the_pipe() -> None:
    """Pain 1."""
    with Sandbox() as box:
        result = box.run("sleep 1000 & echo started", timeout_s=20)
        assert (result.reason, result.exit_code, result.stdout) == ("exited", 0, b"started\n")
        assert result.duration_s < 5


def test_usage_counts() -> None:
    with Sandbox(memory_mb=256) as box:
        result = box.run(["/usr/bin/python3", "-c", "x = bytearray(50 << 20); [i * i for i in range(2000000)]"])
        assert result.usage.cpu_s > 0.02
        assert result.usage.memory_peak_bytes > 40 << 20
        usage = box.usage()
        assert usage.cpu_s >= result.usage.cpu_s * 0.5
        assert 0 < usage.memory_bytes <= 256 << 20
        assert usage.pids >= 1

"""What a process in a sandbox can see and do, looked at from inside: nothing of the host, and no more than in Docker."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill import Sandbox

from .conftest import Server

DOCKER_CAPABILITIES = 0xA80425FB
"""The fourteen capabilities that Docker leaves to root in a container."""


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDMILL_API_URL", server.api_url)
        patch.setenv("SANDMILL_API_KEY", server.api_key)
        with Sandbox() as made:
            yield made


def sh(box: Sandbox, line: str, **options: object) -> str:
    result = box.run(line, **options)  # type: ignore[arg-type]
    return (result.stdout + result.stderr).decode(errors="replace").strip()


def status(box: Sandbox, field: str) -> str:
    return sh(box, f"grep ^{field}: /proc/self/status | cut -f2-")


@pytest.mark.parametrize("kind", ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"])
def test_every_namespace_is_its_own(box: Sandbox, kind: str) -> None:
    inside = sh(box, f"readlink /proc/self/ns/{kind}")
    assert inside.startswith(kind)
    assert inside != str(Path(f"/proc/self/ns/{kind}").readlink())


def test_root_inside_is_not_root_outside(box: Sandbox) -> None:
    assert sh(box, "id -u") == "0"
    inner, outer, count = sh(box, "cat /proc/self/uid_map").split()
    assert (inner, count) == ("0", "65536")
    assert int(outer) >= 65536


def test_two_sandboxes_do_not_share_ids(box: Sandbox, client_environment: Server) -> None:
    with Sandbox() as other:
        assert sh(box, "cat /proc/self/uid_map") != sh(other, "cat /proc/self/uid_map")


def test_capabilities_are_at_most_dockers(box: Sandbox) -> None:
    for field in ("CapBnd", "CapPrm", "CapEff"):
        assert int(status(box, field), 16) & ~DOCKER_CAPABILITIES == 0, field
    for field in ("CapInh", "CapAmb"):
        assert int(status(box, field), 16) == 0, field
    assert int(sh(box, "grep ^CapEff: /proc/self/status | cut -f2", user="1000"), 16) == 0


def test_no_new_privileges_and_a_filter(box: Sandbox) -> None:
    assert status(box, "NoNewPrivs") == "1"
    assert status(box, "Seccomp") == "2"


def test_pid_1_is_out_of_reach(box: Sandbox) -> None:
    assert sh(box, "ls -l /proc/1/exe /proc/1/fd /proc/1/root 2>&1 | grep -c -i 'denied\\|cannot'") != "0"
    assert "denied" in sh(box, "cat /proc/1/environ; cat /proc/1/mem").lower()
    assert sh(box, "kill -9 1; kill -STOP 1; echo alive") == "alive"
    assert sh(box, "echo still here") == "still here"


@pytest.mark.parametrize(
    "line",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /proc/sys",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "mknod /tmp/sda b 8 0 && cat /tmp/sda",
        "mknod /tmp/mem c 1 1 && cat /tmp/mem",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo b > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo 0 > /proc/sys/vm/overcommit_memory",
        "echo test > /sys/kernel/uevent_helper",
        "chroot /proc/1/root true",
        "nsenter -t 1 -m true",
        "date -s 2001-01-01",
        "hostname changed",
        "dmesg",
        "head -c 65536 /dev/zero > /tmp/swap; mkswap /tmp/swap; swapon /tmp/swap",
        "sysctl -w kernel.hostname=x",
    ],
)
def test_refused(box: Sandbox, line: str) -> None:
    result = box.run(f"PATH=$PATH:/usr/sbin:/sbin; {line}", timeout_s=10)
    assert result.exit_code not in (0, None), f"{line} worked: {result.stdout!r}"


def test_the_host_is_not_visible(box: Sandbox) -> None:
    assert sh(box, "ls /root /home/user | grep -v ':' | tr -d '\\n'") == ""
    mounts = sh(box, "cat /proc/self/mountinfo")
    for word in ("/dev/vda", "/dev/sd", "/dev/nvme", "cgroup2 ", "/old"):
        for line in mounts.splitlines():
            source = line.split(" - ")[1].split()[1] if " - " in line else ""
            assert word.strip() not in source or word == "cgroup2 ", f"{line} shows the host"
    assert sh(box, "env | grep -i -E 'sandmill|token|secret' | grep -v SANDMILL_CALL") == ""
    seen = set(sh(box, "ps -e -o comm= 2>/dev/null || cat /proc/[0-9]*/comm").split())
    assert seen <= {"sandboxd", "ps", "sh", "bash", "cat"}
    hashes = sh(box, "cut -d: -f2 /etc/shadow | sort -u").split()
    assert set(hashes) <= {"*", "!"}, "a password hash of the host is inside"
    for secret in ("/etc/ssh", "/etc/machine-id", "/etc/sudoers", "/root/.ssh", "/var/lib/sandmill"):
        assert sh(box, f"test -s {secret} && find {secret} -type f | head -1 | xargs -r cat") == "", secret


def test_devices_are_few(box: Sandbox) -> None:
    devices = set(sh(box, "find /dev -type c -o -type b | grep -v /dev/pts/ | sort").split())
    allowed = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"}
    assert devices <= allowed
    assert {"/dev/null", "/dev/zero", "/dev/urandom"} <= devices
    assert sh(box, "echo x > /dev/null; head -c 4 /dev/zero | od -An -tx1").split() == ["00"] * 4


@pytest.mark.parametrize(
    "path", ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"]
)
def test_masked(box: Sandbox, path: str) -> None:
    assert sh(box, f"test -d {path} && ls -A {path} || head -c 64 {path} 2>/dev/null") == ""


def test_no_network_by_default(box: Sandbox) -> None:
    """Loopback is up (case 26), and there is nothing else: no route out, and the host's loopback is another one."""
    assert sh(box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1").split() == ["lo"]
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = threading.Event()

    def accept() -> None:
        try:
            listener.accept()
            accepted.set()
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    port = listener.getsockname()[1]
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    assert box.run(["/usr/bin/python3", "-c", code]).exit_code == 1
    assert not accepted.is_set()
    listener.close()
    assert "getent" not in sh(box, "getent hosts localhost $(hostname)")
    code = (
        "import socket, threading; s = socket.create_server(('::1', 0), family=socket.AF_INET6); c ="
        " socket.create_connection(s.getsockname()[:2], 2); print('v6')"
    )
    assert sh(box, f'python3 -c "{code}"') == "v6"


def test_abstract_sockets_are_not_shared(box: Sandbox) -> None:
    name = f"\0sandmill-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r})"
        assert box.run(["/usr/bin/python3", "-c", code]).exit_code == 1

"""A thousand create/exec/kill cycles leave nothing behind: no memory, descriptor, mount, cgroup, namespace or directory."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandmill import Sandbox

from .conftest import Server, claimed, temporary_server

CYCLES = 1000
WARM_UP = 200
AT_ONCE = 8
MOST_WARM = 4


@dataclass(frozen=True)
class Traces:
    """What a sandbox could leave on the machine, as one look at it."""

    processes: int
    mounts: int
    cgroup_directories: int
    network_namespaces: int
    state_directories: int
    warm: int
    """Sandboxes that wait for a caller: a bounded number, as many before as after."""
    open_files: dict[str, int]
    resident_kb: dict[str, int]

    @staticmethod
    def of(server: Server) -> "Traces":
        pids = {"serve": server.process.pid, "noded": noded_pid(server.state_dir)}
        return Traces(
            processes=sum(1 for pid in all_pids() if comm(pid) == "sandboxd" and parent(pid) == pids["noded"]),
            mounts=len(Path("/proc/self/mountinfo").read_text().splitlines())
            + len(Path(f"/proc/{pids['noded']}/mountinfo").read_text().splitlines()),
            cgroup_directories=len(cgroups_of(server.state_dir)),
            network_namespaces=len({link for pid in all_pids() if (link := namespace(pid, "net"))}),
            state_directories=len(claimed(server.state_dir)),
            warm=sum(1 for _ in (server.state_dir / "sandboxes").iterdir()) - len(claimed(server.state_dir)),
            open_files={name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
            resident_kb={name: resident(pid) for name, pid in pids.items()},
        )


def noded_pid(state_dir: Path) -> int:
    return int(json.loads((state_dir / "noded.json").read_text())["pid"])


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def namespace(pid: int, kind: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return ""


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"no VmRSS of {pid}")


def cgroups_of(state_dir: Path) -> list[Path]:
    """Directories of sandboxes in every hierarchy, wherever this node's group lies (its name is noded's to choose)."""
    ids = {entry.name for entry in (state_dir / "sandboxes").iterdir()}
    top = [path for path in Path("/sys/fs/cgroup").glob("**/sandmill") if path.is_dir()]
    return [path for group in top for path in group.glob("*/*") if path.is_dir() and path.name in ids]


def nodes() -> set[Path]:
    """The groups of all nodes of this machine, in every hierarchy; a shared server's warm pool comes and goes in its own."""
    return {top for top in Path("/sys/fs/cgroup").glob("*/sandmill/*") if top.is_dir()}


def sandbox_cgroups(but: set[Path]) -> int:
    """How many sandbox groups there are of nodes that came after `but` was taken."""
    count = 0
    for top in nodes() - but:
        try:
            count += sum(1 for path in top.iterdir() if path.is_dir())
        except FileNotFoundError:
            pass  # it goes just now
    return count


def cycle(_: int) -> None:
    with Sandbox() as box:
        result = box.run(["/bin/sh", "-c", "echo $$ > /tmp/x; sleep 30 & echo done"])
        assert (result.exit_code, result.stdout) == (0, b"done\n")


def run_cycles(count: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(cycle, range(count)))


def settled(server: Server, expected: Traces | None) -> Traces:
    """The traces once the kernel's own workers have caught up (they free namespaces in batches)."""
    deadline = time.monotonic() + 20
    while True:
        traces = Traces.of(server)
        quiet = traces.processes == traces.warm == MOST_WARM and traces.state_directories == 0
        same = expected is None or (traces.mounts, traces.network_namespaces) <= (
            expected.mounts,
            expected.network_namespaces,
        )
        if (quiet and same) or time.monotonic() > deadline:
            return traces
        time.sleep(0.2)


def test_a_thousand_cycles_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    others = nodes()
    with temporary_server() as server:
        monkeypatch.setenv("SANDMILL_API_URL", server.api_url)
        monkeypatch.setenv("SANDMILL_API_KEY", server.api_key)
        run_cycles(WARM_UP)
        before = settled(server, None)
        pooled = sandbox_cgroups(others)
        run_cycles(CYCLES)
        after = settled(server, before)

        assert after.processes == after.warm == MOST_WARM
        assert after.state_directories == 0
        assert after.cgroup_directories == before.cgroup_directories
        assert after.mounts <= before.mounts
        assert after.network_namespaces <= before.network_namespaces + 1
        assert sandbox_cgroups(others) <= pooled + AT_ONCE, "groups beyond the bounded pool are left"
        for name, count in after.open_files.items():
            assert count <= before.open_files[name] + AT_ONCE, f"{name} keeps descriptors: {before} -> {after}"
        for name, kilobytes in after.resident_kb.items():
            grown = kilobytes - before.resident_kb[name]
            assert grown < 8 * 1024, f"{name} grew by {grown} kB over {CYCLES} cycles"
    assert sandbox_cgroups(others) == 0, "a stopped node leaves cgroups"
    assert not server.state_dir.exists() or not list((server.state_dir / "sandboxes").iterdir())

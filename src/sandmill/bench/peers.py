"""What Sandmill is measured against: the bare kernel, bwrap, runc, a spawn on the host."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandmill.bench.samples import Samples


def raw_program() -> Path | None:
    """`sandmill-raw` (benchmarks/raw), built when this is a source checkout with cargo; None elsewhere."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "raw" / "Cargo.toml").is_file() or shutil.which("cargo") is None:
        return None
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    target = Path(os.environ.get("CARGO_TARGET_DIR") or Path.home() / ".cache" / "sandmill" / "target")
    command = ["cargo", "build", "-q", "--release", "--locked", "--target", host, "--target-dir", str(target)]
    subprocess.run([*command, "-p", "sandmill-raw"], cwd=root, check=True)
    return target / host / "release" / "sandmill-raw"


def raw_create(program: Path, samples: Samples, count: int, *, net: bool) -> None:
    """Bare clone + overlay + pivot_root + exec, as in benchmarks/raw."""
    command = [str(program), "create", str(count), *(["--net"] if net else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        samples.absent = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"
        return
    samples.values += [float(line) for line in done.stdout.split()]


def raw_rate(program: Path, count: int) -> float | None:
    """Bare creates with a network namespace, killed and removed again, a second: one program a core, `count` each.

    What the kernel alone can do on this machine, with nothing run inside and nobody asked over a socket.
    """
    cores = len(os.sched_getaffinity(0))
    start = time.perf_counter()
    command = [str(program), "create", str(count), "--net"]
    programs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(cores)]
    ended = [one.wait() for one in programs]
    return cores * count / (time.perf_counter() - start) if not any(ended) else None


def host_spawn(program: str = "/bin/true") -> None:
    """A spawn on the host from this Python, as a user would write it."""
    subprocess.run([program], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def bwrap_command() -> list[str] | None:
    if shutil.which("bwrap") is None:
        return None
    links = [("usr/bin", "/bin"), ("usr/lib", "/lib"), ("usr/lib64", "/lib64"), ("usr/sbin", "/sbin")]
    flags = [part for target, link in links for part in ("--symlink", target, link)]
    return ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", *flags, "--proc", "/proc", "--dev", "/dev", "true"]


@contextmanager
def runc_bundle() -> Iterator[Path | None]:
    """A bundle that holds one static program; None when runc or busybox-static isn't installed."""
    busybox = shutil.which("busybox")
    if shutil.which("runc") is None or busybox is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sandmill-bench-runc-") as folder:
        bundle = Path(folder)
        (bundle / "rootfs" / "bin").mkdir(parents=True)
        shutil.copy(busybox, bundle / "rootfs" / "bin" / "true")
        subprocess.run(["runc", "spec"], cwd=bundle, check=True, capture_output=True)
        config = json.loads((bundle / "config.json").read_text())
        config["process"].update(terminal=False, args=["/bin/true"])
        config["process"].pop("rlimits", None)
        (bundle / "config.json").write_text(json.dumps(config))
        yield bundle


def runc_run(bundle: Path, name: str) -> None:
    command = ["runc", "run", "--bundle", str(bundle), name]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)

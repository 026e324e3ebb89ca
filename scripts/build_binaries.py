#!/usr/bin/env python3
"""Builds noded and sandboxd with cargo and lays them where the package looks for them (`src/sandmill/_bin/`).

Used by the Makefile and by the wheel's build hook. cargo's target directory lies outside the tree
(`$CARGO_TARGET_DIR`, else ~/.cache/sandmill/target), so that a fresh clone on a warm machine builds in seconds.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

BINARIES = ("noded", "sandboxd")


def build(root: Path) -> Path:
    """Builds both daemons of the checkout at `root`; returns the folder that holds them.

    Raises SystemExit with what to do when cargo is missing or the build fails.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise SystemExit("building sandmill needs cargo (Rust 1.85 or newer): install it, or install a wheel")
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    target = Path(os.environ.get("CARGO_TARGET_DIR") or Path.home() / ".cache" / "sandmill" / "target")
    command = [cargo, "build", "--release", "--locked", "--target", host, "--target-dir", str(target)]
    if subprocess.run(command, cwd=root, check=False).returncode != 0:
        raise SystemExit(f"cargo failed: {' '.join(command)}")
    out = root / "src" / "sandmill" / "_bin"
    out.mkdir(parents=True, exist_ok=True)
    for name in BINARIES:
        built = target / host / "release" / name
        if _same(built, out / name):
            continue
        fresh = out / f".{name}.new"
        shutil.copy2(built, fresh)
        fresh.rename(out / name)  # a running daemon keeps its old inode
    return out


def _same(built: Path, installed: Path) -> bool:
    if not installed.is_file():
        return False
    a, b = built.stat(), installed.stat()
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


if __name__ == "__main__":
    build(Path(__file__).resolve().parent.parent)
    sys.exit(0)

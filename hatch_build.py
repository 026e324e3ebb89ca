"""Builds the two static daemons with cargo and puts them into the wheel (`sandmill/_bin/`).

Used by `pip wheel .`, `pip install .` and the editable install. With SANDMILL_SKIP_CARGO=1 binaries already in
src/sandmill/_bin/ are taken as they are.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARIES = ("noded", "sandboxd")


class CargoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        out = root / "src" / "sandmill" / "_bin"
        if os.environ.get("SANDMILL_SKIP_CARGO") != "1":
            self._build(root, out)
        missing = [name for name in BINARIES if not (out / name).is_file()]
        if missing:
            raise SystemExit(f"no binaries {', '.join(missing)} in {out}: unset SANDMILL_SKIP_CARGO to build them")
        build_data["pure_python"] = False
        # Static binaries and no extension module: any Python 3, this architecture only.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        for name in BINARIES:
            build_data["force_include"][str(out / name)] = f"sandmill/_bin/{name}"

    def _build(self, root: Path, out: Path) -> None:
        cargo = shutil.which("cargo")
        if cargo is None:
            raise SystemExit("building sandmill needs cargo (Rust 1.85 or newer): install it, or install a wheel")
        version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
        host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
        target = Path(os.environ.get("CARGO_TARGET_DIR") or Path.home() / ".cache" / "sandmill" / "target")
        subprocess.run(
            [cargo, "build", "--release", "--locked", "--target", host, "--target-dir", str(target)],
            cwd=root,
            check=True,
        )
        out.mkdir(parents=True, exist_ok=True)
        for name in BINARIES:
            fresh = out / f".{name}.new"
            shutil.copy2(target / host / "release" / name, fresh)
            fresh.rename(out / name)  # a running daemon keeps its old inode

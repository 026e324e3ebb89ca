"""Puts the two static daemons into the wheel (`sandmill/_bin/`), built by scripts/build_binaries.py.

With SANDMILL_SKIP_CARGO=1 binaries already in src/sandmill/_bin/ are taken as they are.
"""

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CargoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        script = runpy.run_path(str(root / "scripts" / "build_binaries.py"))
        out = root / "src" / "sandmill" / "_bin"
        if os.environ.get("SANDMILL_SKIP_CARGO") != "1":
            script["build"](root)
        missing = [name for name in script["BINARIES"] if not (out / name).is_file()]
        if missing:
            raise SystemExit(f"no binaries {', '.join(missing)} in {out}: unset SANDMILL_SKIP_CARGO to build them")
        # Static binaries and no extension module: any Python 3, this architecture only.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            for name in script["BINARIES"]:
                build_data["force_include"][str(out / name)] = f"sandmill/_bin/{name}"

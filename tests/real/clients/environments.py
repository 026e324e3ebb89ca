"""Virtual environments of other people's clients, each with the release that its requirements file pins.

They lie outside of the tree, in `~/.cache/sandmill/clients`, and are made anew when the file changes; what was
not used for a week goes. Sandmill itself is in each of them as an editable install of this checkout.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
UNUSED_S = 7 * 86400.0


def client_python(name: str) -> Path:
    """The interpreter of the environment with `requirements/NAME.txt`, made with its first use.

    A first line `# python >= 3.12` asks for a newer one than that of the tests. Without one the test is
    skipped.
    """
    requirements = HERE / "requirements" / f"{name}.txt"
    text = requirements.read_text()
    interpreter = _interpreter(text)
    key = hashlib.sha256(f"{text}\n{interpreter}\n{ROOT}\n{(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sandmill" / "clients"
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / f"{name}-{key[:16]}"
    python = place / "bin" / "python"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            for marker in cache.glob("*/.ready"):
                if marker.stat().st_mtime < time.time() - UNUSED_S:
                    shutil.rmtree(marker.parent, ignore_errors=True)
            subprocess.run([interpreter, "-m", "venv", place], check=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            environment = {**os.environ, "SANDMILL_SKIP_CARGO": "1"}
            subprocess.run([*pip, "-r", str(requirements), "-e", str(ROOT)], check=True, env=environment)
        (place / ".ready").touch()
    return python


def _interpreter(requirements: str) -> str:
    wanted = re.match(r"# python >= 3\.(\d+)", requirements)
    minor = int(wanted[1]) if wanted else 0
    if sys.version_info >= (3, minor):
        return sys.executable
    roots = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep)]
    roots += sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin"))
    for number in range(minor, 20):
        for root in roots:
            program = root / f"python3.{number}"
            # pyenv's shims exist for versions that aren't chosen, and fail.
            if (
                program.exists()
                and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
            ):
                return str(program)
    pytest.skip(f"there is no Python 3.{minor} or newer on this machine; apt-get or pyenv installs one")

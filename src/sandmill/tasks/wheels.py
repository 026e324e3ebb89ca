"""Pure-Python wheels for environments, fetched by this machine's pip and kept.

Fetching a wheel runs no code of it (a source distribution would run its build on the host), so this is safe outside a
sandbox, and sandboxes need neither a network nor pip.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sandmill.errors import PreparationError

FETCH_S = 300.0


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sandmill/wheels`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sandmill" / "wheels"


def fetch(requirement: str, cache: Path | None = None) -> Path:
    """The wheel of `name==version`; from the cache if it is there. Blocking (up to 300 s).

    Raises PreparationError when pip can't get it or it isn't a pure-Python wheel.
    """
    shelf = (cache or cache_dir()) / hashlib.sha256(requirement.lower().encode()).hexdigest()[:24]
    kept = sorted(shelf.glob("*.whl"))
    if kept:
        return kept[0]
    shelf.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".fetch-", dir=shelf.parent))
    try:
        _download(requirement, fresh)
        wheel = _only_wheel(requirement, fresh)
        try:
            fresh.rename(shelf)
        except OSError:
            pass  # another process was first; its wheel is as good
        return shelf / wheel.name
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _download(requirement: str, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(into), "--", requirement],
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreparationError(f"fetching {requirement} took longer than {FETCH_S:.0f} s", retryable=True) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise PreparationError(
            f"pip could not fetch {requirement}: {said.splitlines()[-1] if said else 'it said nothing'}",
            hint="check the network and pip's configuration of this machine",
            details={"step": f"wheels: {requirement}", "output": said},
        )


def _only_wheel(requirement: str, folder: Path) -> Path:
    wheel = next(iter(sorted(folder.glob("*.whl"))), None)
    if wheel is None or not wheel.name.endswith("-none-any.whl"):
        name = wheel.name if wheel else "nothing"
        raise PreparationError(f"{requirement} has no pure-Python wheel (pip gave {name})", details={"step": "wheels"})
    return wheel


def content(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The wheel's files as they lie in site-packages; scripts and data aren't among them."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = PurePosixPath(info.filename)
            if info.is_dir() or path.parts[0].endswith(".data"):
                continue
            if path.is_absolute() or ".." in path.parts:
                raise PreparationError(f"{wheel.name} holds a path that leads out of it: {info.filename}")
            yield str(path), archive.read(info)

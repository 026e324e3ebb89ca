"""environment/prepare.toml: an image and the steps that make a task's environment out of it.

```toml
image = "host"                 # or the name of an image in the store
workdir = "/app"               # optional; made if missing
user = "root"                  # optional default user
network = "none"               # of the steps: none (default) or all
env = { LANG = "C.UTF-8" }     # optional; stays for everything that runs in the environment

[[steps]]                      # in order, each one of:
wheels = ["pytest==8.3.4"]     # pure-Python wheels by exact version, fetched by this machine's pip, unpacked into `to`
to = "/opt/testing"

[[steps]]
copy = "files"                 # a file or folder beside this one, into `to`
to = "/app"

[[steps]]
run = "make -C /app"           # a shell line, as root, in workdir
```

The steps run once for their content, however many attempts use them. `wheels` are fetched outside of the sandbox (by the
machine's own pip) and no code of theirs runs there, so most environments need no network even for preparation.

A task that has only environment/Dockerfile is built from that (sandmill.builds), with a network while it is built.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandmill.tasks.problems import Problems, Table

_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+")


@dataclass(frozen=True)
class Run:
    """A shell line, as root."""

    line: str


@dataclass(frozen=True)
class Copy:
    """A file or folder of the task into a directory of the environment."""

    source: Path
    to: str


@dataclass(frozen=True)
class Wheels:
    """Pure-Python wheels by exact version, unpacked into a directory."""

    requirements: tuple[str, ...]
    to: str


Step = Run | Copy | Wheels


@dataclass(frozen=True)
class Environment:
    """What a task's sandboxes are made from."""

    image: str = "host"
    steps: tuple[Step, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    network: str = "none"
    dockerfile: Path | None = None
    """Instead of all of these: what to build it from, with its folder as the context."""


def read_environment(folder: Path, docker_image: str | None, problems: Problems) -> Environment:
    """Reads environment/prepare.toml; without one it is `docker_image`, an image in the store, else environment/Dockerfile."""
    file = folder / "prepare.toml"
    if not file.is_file():
        if docker_image is None:
            return _from_dockerfile(folder, problems)
        return Environment(image=docker_image)
    try:
        data = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.add(file, None, f"not TOML: {error}")
        return Environment()
    root = Table(file, "", data, problems)
    listed = root.raw("steps", [])
    if not isinstance(listed, list):
        root.problem("steps", "must be a list of tables: [[steps]]")
        listed = []
    steps = [_step(Table(file, f"steps[{at}]", item, problems), folder) for at, item in enumerate(listed)]
    network = root.text("network") or "none"
    if network not in ("none", "all"):
        root.problem("network", f"must be none or all, not {network!r}")
    workdir = root.text("workdir")
    if workdir is not None and not workdir.startswith("/"):
        root.problem("workdir", f"must be an absolute path, not {workdir!r}")
    environment = Environment(
        image=root.text("image") or "host",
        steps=tuple(step for step in steps if step is not None),
        env=root.texts("env"),
        workdir=workdir,
        user=root.text("user"),
        network=network,
    )
    root.finish()
    return environment


def _from_dockerfile(folder: Path, problems: Problems) -> Environment:
    file = folder / "Dockerfile"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            problems.add(folder / name, None, "tasks of several containers are not supported")
    if not file.is_file():
        what = "missing, and so is a Dockerfile; write one of them, or name an image in task.toml: environment.docker_image"
        problems.add(folder / "prepare.toml", None, what)
        return Environment()
    from sandmill.builds import dockerfile  # most tasks need it not

    found = dockerfile.Problems()
    try:
        dockerfile.examine(file.read_text(), found)
    except UnicodeDecodeError as error:
        problems.add(file, None, f"not UTF-8: {error}")
    for line, what in sorted(found.found):
        problems.add(file, f"line {line}", what)
    return Environment(network="all", dockerfile=file)


def _step(table: Table, folder: Path) -> Step | None:
    kinds = [kind for kind in ("run", "copy", "wheels") if table.has(kind)]
    if len(kinds) != 1:
        table.problem("run|copy|wheels", "a step is exactly one of them")
        return None
    made: Step | None = None
    if kinds == ["run"]:
        line = table.text("run")
        made = Run(line) if line else None
        if line == "":
            table.problem("run", "is empty")
    elif kinds == ["copy"]:
        made = _copy(table, folder)
    else:
        made = _wheels(table)
    table.finish()
    return made


def _copy(table: Table, folder: Path) -> Copy | None:
    name, to = table.text("copy"), _to(table)
    if name is None or to is None:
        return None
    source = folder / name
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        table.problem("copy", f"must lie in {folder}, not {name!r}")
        return None
    if not source.exists():
        table.problem("copy", f"there is no {source}")
        return None
    return Copy(source, to)


def _wheels(table: Table) -> Wheels | None:
    listed, to = table.raw("wheels"), _to(table)
    if not isinstance(listed, list) or not listed or not all(isinstance(item, str) for item in listed):
        table.problem("wheels", "must be a list of requirements such as 'pytest==8.3.4'")
        return None
    for item in listed:
        if not _PIN.fullmatch(item):
            table.problem("wheels", f"{item!r} must be a name and an exact version: name==1.2.3")
    return Wheels(tuple(listed), to) if to else None


def _to(table: Table) -> str | None:
    to = table.text("to")
    if to is None or not to.startswith("/") or ".." in PurePosixPath(to).parts:
        table.problem("to", "must be an absolute path")
        return None
    return to

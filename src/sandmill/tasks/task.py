"""A task: a folder in Harbor's layout, read whole and checked before anything runs."""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandmill.errors import UsageError
from sandmill.tasks.config import TaskConfig, read_config
from sandmill.tasks.environment import Environment, read_environment
from sandmill.tasks.problems import Problems

CONFIG = "task.toml"
_NOISE = {"__pycache__", ".DS_Store", ".git", ".pytest_cache"}
_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """One task. `content_hash` covers every file of its folder: attempts of other content are other attempts."""

    name: str
    folder: Path
    instruction: str
    config: TaskConfig
    environment: Environment
    content_hash: str

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"

    @property
    def workdir(self) -> str | None:
        """task.toml's, else the environment's."""
        return self.config.workdir or self.environment.workdir

    @classmethod
    def load(cls, folder: Path) -> "Task":
        """Reads a task folder; raises TaskError with everything that is wrong with it."""
        problems = Problems()
        task = _load(folder, problems)
        problems.raise_any()
        return task


def find_tasks(path: Path) -> list[Task]:
    """The task in a folder, or all tasks in the folders directly within it, by name.

    Raises UsageError where there is none, TaskError with every problem of every task.
    """
    if (path / CONFIG).is_file():
        folders = [path]
    elif path.is_dir():
        folders = sorted(entry for entry in path.iterdir() if (entry / CONFIG).is_file())
    else:
        raise UsageError(f"there is no folder {path}")
    if not folders:
        raise UsageError(f"no tasks in {path}", hint=f"a task is a folder with a {CONFIG}")
    problems = Problems()
    tasks = [_load(folder, problems) for folder in folders]
    problems.raise_any()
    return tasks


def _load(folder: Path, problems: Problems) -> Task:
    config = TaskConfig()
    file = folder / CONFIG
    try:
        config = read_config(file, tomllib.loads(file.read_text()), problems)
    except FileNotFoundError:
        problems.add(file, None, "missing")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.add(file, None, f"not TOML: {error}")
    instruction = ""
    words = folder / "instruction.md"
    try:
        instruction = _without_canary(words.read_text())
        if not instruction.strip():
            problems.add(words, None, "is empty")
    except FileNotFoundError:
        problems.add(words, None, "missing")
    except UnicodeDecodeError as error:
        problems.add(words, None, f"not UTF-8: {error}")
    if not (folder / "tests" / "test.sh").is_file():
        problems.add(folder / "tests" / "test.sh", None, "missing")
    environment = read_environment(folder / "environment", config.docker_image, problems)
    return Task(folder.resolve().name, folder.resolve(), instruction, config, environment, hash_of(folder))


def _without_canary(text: str) -> str:
    """Without the leading lines that mark a benchmark's data; agents aren't shown them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0]):
        lines.pop(0)
    return "\n".join(lines)


def files_of(folder: Path) -> Iterator[Path]:
    """Files and links below a folder in a fixed order, without what tools leave behind."""
    for entry in sorted(folder.iterdir()):
        if entry.name in _NOISE or entry.suffix == ".pyc":
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from files_of(entry)
        else:
            yield entry


def hash_of(folder: Path) -> str:
    """SHA-256 over paths, kinds, executable bits and bytes."""
    digest = hashlib.sha256()
    for path in files_of(folder):
        if path.is_symlink():
            kind, content = b"l", os.fsencode(os.readlink(path))
        else:
            kind, content = (b"x" if os.access(path, os.X_OK) else b"f"), path.read_bytes()
        name = os.fsencode(path.relative_to(folder))
        digest.update(b"%d:%s%s%d:" % (len(name), name, kind, len(content)))
        digest.update(content)
    return digest.hexdigest()

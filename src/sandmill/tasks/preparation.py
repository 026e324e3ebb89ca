"""An environment as the body of `POST /v1/environments`."""

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

from sandmill.tasks import wheels
from sandmill.tasks.environment import Copy, Environment, Run, Step
from sandmill.tasks.task import files_of


def request_of(environment: Environment, cache: Path | None = None) -> dict[str, Any]:
    """Reads the files and fetches the wheels (blocking). Equal content gives equal bytes, whatever the files' times.

    Raises PreparationError for wheels that can't be had.
    """
    return {
        "image": environment.image,
        "steps": [_step(step, cache) for step in environment.steps],
        "env": dict(environment.env),
        "workdir": environment.workdir,
        "user": environment.user,
        "network": environment.network,
    }


def _step(step: Step, cache: Path | None) -> dict[str, Any]:
    if isinstance(step, Run):
        return {"run": step.line}
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if isinstance(step, Copy):
            _add_tree(archive, step.source)
        else:
            for requirement in step.requirements:
                for name, data in wheels.content(wheels.fetch(requirement, cache)):
                    _add(archive, name, data, 0o644)
    return {"tar": base64.b64encode(sink.getvalue()).decode(), "to": step.to}


def _add_tree(archive: tarfile.TarFile, source: Path) -> None:
    paths = files_of(source) if source.is_dir() else [source]
    base = source if source.is_dir() else source.parent
    for path in paths:
        name = str(path.relative_to(base))
        if path.is_symlink():
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = str(path.readlink())
            archive.addfile(link)
        else:
            _add(archive, name, path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644)


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = mode
    archive.addfile(info, io.BytesIO(data))

"""The port: what an evaluation needs of sandboxes. `sdk_workshop` is the real one, `fake` the one in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sandmill.tasks import Environment
from sandmill.wire import Result, Usage


@dataclass(frozen=True)
class BoxSpec:
    """A sandbox to be made. `lease_s`: how long it outlives a client that died."""

    image: str
    network: str = "none"
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    lease_s: float = 120.0


class Box(Protocol):
    """A sandbox. Every method raises SandboxGoneError (with the cause) once it has ended, TransportError when unreachable."""

    @property
    def id(self) -> str: ...

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Runs a command to its end, in the working directory. A failure or a timeout is a result. Cancelled: it is ended."""
        ...

    async def read(self, path: str) -> bytes:
        """A file's bytes; raises NotFoundError, UsageError for what isn't a file."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Writes a whole file."""
        ...

    async def upload(self, folder: Path, path: str) -> None:
        """A folder's content into the directory `path`."""
        ...

    async def download(self, path: str, folder: Path) -> None:
        """A directory's content into `folder`."""
        ...

    async def usage(self) -> Usage: ...

    async def commit(self) -> str:
        """Ends it and keeps its changes as an image, whose name is given."""
        ...

    async def kill(self) -> None:
        """Ends it; nothing of it is left on return. Harmless when it has ended already."""
        ...


class Workshop(Protocol):
    """Where sandboxes come from."""

    async def prepare(self, environment: Environment) -> str:
        """Prepares an environment, once for its content; gives its image. Raises PreparationError, NodeError, ImageError."""
        ...

    async def create(self, spec: BoxSpec) -> Box:
        """Makes a sandbox. Cancelled: it is undone."""
        ...

    async def discard(self, image: str) -> None:
        """Removes an image that `commit` made. Harmless when it is gone already."""
        ...

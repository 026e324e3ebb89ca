"""FakeWorkshop: sandboxes in memory for tests of evaluations (ours and yours). Nothing is ever started.

Files are a dictionary. What a command does is said by `on`: `workshop.on("/tests/test.sh", handler)` where the handler gets
the box and gives a Result; any other command succeeds and does nothing. `fail_next("create", error)` makes the next call of a
kind raise. `open_boxes` and `images` show what was left behind.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from sandmill.errors import NotFoundError, SandboxGoneError
from sandmill.rollouts.workshop import BoxSpec
from sandmill.tasks import Environment
from sandmill.tasks.task import files_of
from sandmill.wire import Result, Usage

Handler = Callable[["FakeBox"], Awaitable[Result] | Result]


def ended(exit_code: int | None = 0, *, reason: str = "exited", stdout: bytes = b"", stderr: bytes = b"") -> Result:
    """A Result for handlers."""
    return Result(pid=2, exit_code=exit_code, reason=reason, stdout=stdout, stderr=stderr)


class FakeBox:
    """A sandbox that is a dictionary of files. `ran` lists its commands."""

    def __init__(self, workshop: "FakeWorkshop", number: int, spec: BoxSpec, files: dict[str, bytes]) -> None:
        self.id = f"i{number:019d}"
        self.spec = spec
        self.files = files
        self.ran: list[str] = []
        self.env: Mapping[str, str] = {}
        """The environment of the command that runs now."""
        self._workshop = workshop
        self._cause: str | None = None

    def die(self, cause: str) -> None:
        """Ends it as the machine would: oom, crashed, node_restarted."""
        self._cause = cause
        self._workshop.open_boxes.discard(self)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        self._call("run")
        text = command if isinstance(command, str) else " ".join(command)
        self.ran.append(text)
        self.env = env or {}
        if text.startswith("rm -rf /tests /logs/verifier"):
            self.files = {
                path: data for path, data in self.files.items() if not path.startswith(("/tests/", "/logs/verifier/"))
            }
        handler = self._workshop.handlers.get(text)
        if handler is None:
            return ended()
        result = handler(self)
        result = result if isinstance(result, Result) else await result
        self._alive()
        return result

    async def read(self, path: str) -> bytes:
        self._call("read")
        if path not in self.files:
            raise NotFoundError(f"there is no {path}")
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        self._call("write")
        self.files[path] = data

    async def upload(self, folder: Path, path: str) -> None:
        self._call("upload")
        for file in files_of(folder):
            self.files[f"{path}/{file.relative_to(folder)}"] = file.read_bytes()

    async def download(self, path: str, folder: Path) -> None:
        self._call("download")
        await asyncio.to_thread(_save, {n: d for n, d in self.files.items() if n.startswith(f"{path}/")}, folder)

    async def usage(self) -> Usage:
        self._call("usage")
        return Usage(cpu_s=0.5, memory_peak_bytes=1 << 20)

    async def commit(self) -> str:
        self._call("commit")
        image = f"fake-layer:{self.id}"
        self._workshop.images[image] = dict(self.files)
        self.die("committed")
        return image

    async def kill(self) -> None:
        self._workshop.call("kill")
        self._workshop.open_boxes.discard(self)
        self._cause = self._cause or "killed"

    def _call(self, name: str) -> None:
        self._workshop.call(name)
        self._alive()

    def _alive(self) -> None:
        if self._cause is not None:
            raise SandboxGoneError(f"the sandbox has ended: {self._cause}", details={"cause": self._cause})


def _save(files: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name.rsplit("/", 1)[1]).write_bytes(data)


class FakeWorkshop:
    """Makes fake boxes."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.open_boxes: set[FakeBox] = set()
        self.boxes: list[FakeBox] = []
        """All that were ever made."""
        self.images: dict[str, dict[str, bytes]] = {}
        """Images that `commit` made and nobody discarded."""
        self.prepared: list[Environment] = []
        self._failures: dict[str, list[Exception]] = {}
        self._before: dict[str, Callable[[], Awaitable[None]]] = {}

    def on(self, command: str, handler: Handler) -> None:
        """Says what a command (a line, or argv joined by blanks) does."""
        self.handlers[command] = handler

    def fail_next(self, call: str, *errors: Exception) -> None:
        """The next calls named so (`prepare`, `create`, `run`, `commit`, `kill`, …) raise these errors."""
        self._failures.setdefault(call, []).extend(errors)

    def before(self, call: str, wait: Callable[[], Awaitable[None]]) -> None:
        """Awaited at the start of every `prepare` or `create`."""
        self._before[call] = wait

    def call(self, name: str) -> None:
        if self._failures.get(name):
            raise self._failures[name].pop(0)

    async def prepare(self, environment: Environment) -> str:
        if "prepare" in self._before:
            await self._before["prepare"]()
        self.prepared.append(environment)
        self.call("prepare")
        return "fake-environment"

    async def create(self, spec: BoxSpec) -> FakeBox:
        if "create" in self._before:
            await self._before["create"]()
        self.call("create")
        box = FakeBox(self, len(self.boxes), spec, dict(self.images.get(spec.image, {})))
        self.boxes.append(box)
        self.open_boxes.add(box)
        return box

    async def discard(self, image: str) -> None:
        self.call("discard")
        self.images.pop(image, None)

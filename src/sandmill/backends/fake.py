"""FakeBackend: sandboxes in memory, for fast tests (ours and yours). No process is ever started.

It keeps the contract of `base` (typed ends, leases on a clock that only `advance` moves, idempotent creates) and runs the
handful of commands that `fake_shell` documents. For anything else script it: `backend.on(r"pytest.*", lambda command: ...)`
answers commands whose text matches, and `backend.fail_next("create", error)` makes the next call of a kind fail.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from sandmill.backends import fake_shell
from sandmill.backends.base import Events, Inventory
from sandmill.errors import ConflictError, NotFoundError, SandboxGoneError, SandmillError, UsageError
from sandmill.sdk.live import Kept
from sandmill.wire import (
    Collected,
    Collection,
    Exec,
    ImageConfig,
    ImageInfo,
    Limits,
    Pulling,
    RemovedImage,
    Result,
    SandboxEnd,
    SandboxInfo,
    SandboxSpec,
    Usage,
)

Handler = Callable[[Exec], Result]
EPOCH = 1_700_000_000.0


class _Box:
    def __init__(self, spec: SandboxSpec, image: ImageInfo, files: dict[str, bytes], now: float) -> None:
        self.spec = spec
        self.image = image
        self.files = files
        self.directories: set[str] = set()
        for path in ["/tmp", "/root", "/home/user", spec.workdir or "/", *(name.rsplit("/", 1)[0] for name in files)]:
            fake_shell.add_directories(self.directories, path)
        self.created_at = now
        self.expires_at = now + spec.lease.ttl_s
        self.renew_on_use = spec.lease.renew_on_use
        self.ttl_s = spec.lease.ttl_s
        self.calls = 0


class FakeBackend:
    """Implements `base.Backend` in memory. `io(id)` gives a sandbox's own calls.

    Args:
        images: Names of the images that are there.
        registry: Names of those that can be pulled.
    """

    def __init__(self, images: tuple[str, ...] = ("host",), *, registry: tuple[str, ...] = ()) -> None:
        self._registry = registry
        self.now = EPOCH
        self._boxes: dict[str, _Box] = {}
        self._ends: dict[str, SandboxEnd] = {}
        self._events: list[SandboxEnd] = []
        self._changed = asyncio.Event()
        self._images: dict[str, tuple[ImageInfo, dict[str, bytes]]] = {
            name: (ImageInfo(id=f"fake:{name}", names=[name], created_at=self.now), {}) for name in images
        }
        self._handlers: list[tuple[re.Pattern[str], Handler]] = []
        self._failures: dict[str, list[SandmillError]] = {}

    # What tests do with it.

    def advance(self, seconds: float) -> None:
        """Moves the clock; what has expired ends."""
        self.now += seconds
        for sandbox_id in [one for one, box in self._boxes.items() if box.expires_at <= self.now]:
            self._end(sandbox_id, "lease_expired", "its lease was not renewed")

    def on(self, pattern: str, handler: Handler) -> None:
        """Answers commands whose shell line, or argv joined by blanks, matches `pattern` (latest first)."""
        self._handlers.insert(0, (re.compile(pattern, re.DOTALL), handler))

    def fail_next(self, call: str, error: SandmillError) -> None:
        """The next call named so (`create`, `delete`, `run`, ...) raises `error`."""
        self._failures.setdefault(call, []).append(error)

    def end(self, sandbox_id: str, cause: str, message: str = "") -> None:
        """Ends a sandbox as the machine would: `oom`, `crashed`, `node_lost`."""
        self._end(sandbox_id, cause, message)

    def io(self, sandbox_id: str) -> "FakeIO":
        return FakeIO(self, sandbox_id)

    # base.Backend

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        self._maybe_fail("create")
        await asyncio.sleep(0)
        if spec.id in self._boxes:
            return self._info(spec.id)
        if spec.id in self._ends:
            raise self._gone(spec.id)
        if spec.network not in ("none", "all"):
            raise UsageError(f"network is {spec.network!r}", hint="it is none or all")
        image, files = self._find_image(spec.image)
        self._boxes[spec.id] = _Box(spec, image, dict(files), self.now)
        return self._info(spec.id)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        self._maybe_fail("get")
        self._box(sandbox_id)
        return self._info(sandbox_id)

    async def inventory(self) -> Inventory:
        self._maybe_fail("inventory")
        return Inventory([self._info(one) for one in self._boxes], list(self._ends.values()))

    async def destroy(self, sandbox_id: str, cause: str = "killed") -> None:
        self._maybe_fail("destroy")
        await asyncio.sleep(0)
        self._box(sandbox_id)
        self._end(sandbox_id, cause, "")

    async def renew(self, leases: dict[str, float]) -> list[str]:
        self._maybe_fail("renew")
        for sandbox_id, ttl_s in leases.items():
            if (box := self._boxes.get(sandbox_id)) is not None:
                box.expires_at = self.now + ttl_s
        return [one for one in leases if one not in self._boxes]

    async def set_lease(self, sandbox_id: str, ttl_s: float, renew_on_use: bool | None = None) -> None:
        self._maybe_fail("set_lease")
        box = self._box(sandbox_id)
        box.expires_at, box.ttl_s = self.now + ttl_s, ttl_s
        if renew_on_use is not None:
            box.renew_on_use = renew_on_use

    async def usage(self, sandbox_id: str) -> Usage:
        self._maybe_fail("usage")
        box = self._box(sandbox_id)
        size = sum(map(len, box.files.values()))
        limit = box.spec.limits.memory_bytes
        return Usage(cpu_s=box.calls * 0.001, memory_bytes=1 << 20, memory_peak_bytes=1 << 20, memory_limit_bytes=limit,
                     pids=1, disk_bytes=size, disk_limit_bytes=box.spec.limits.disk_bytes, at=self.now)  # fmt: skip

    async def commit(self, sandbox_id: str, name: str | None, config: dict[str, Any] | None = None) -> ImageInfo:
        self._maybe_fail("commit")
        box = self._box(sandbox_id)
        changed = config or {}
        old = box.image.config
        merged = ImageConfig(
            env=old.env | changed.get("env", {}),
            workdir=changed.get("workdir") or old.workdir,
            user=changed.get("user") or old.user,
        )
        image_id = f"fake:{len(self._images)}-{sandbox_id}"
        image = ImageInfo(id=image_id, names=[name] if name else [], config=merged, created_at=self.now)
        self._images[name or image_id] = (image, dict(box.files))
        self._end(sandbox_id, "committed", f"became {image_id}")
        return image

    async def events(self, after: int, wait_s: float) -> Events:
        self._maybe_fail("events")
        if len(self._events) <= after:
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return Events(self._events[after:], max(after, len(self._events)))

    async def images(self) -> list[ImageInfo]:
        return [image for image, _ in self._images.values()]

    async def image(self, name: str) -> ImageInfo:
        return self._find_image(name)[0]

    async def import_image(self, path: str, name: str | None, kind: str = "auto") -> ImageInfo:
        self._maybe_fail("import_image")
        image = ImageInfo(id=f"fake:{path}", names=[name] if name else [], created_at=self.now)
        self._images[name or image.id] = (image, {})
        return image

    async def pull_image(
        self, name: str, *, newest: bool = False, credentials: dict[str, str] | None = None
    ) -> ImageInfo:
        self._maybe_fail("pull_image")
        if name not in self._registry:
            raise NotFoundError(f"the registry has no image {name}", code="image_not_found", hint="check name and tag")
        if name not in self._images or newest:
            image = ImageInfo(id=f"fake:pulled:{name}", names=[name], created_at=self.now)
            self._images[name] = (image, {})
        return self._images[name][0]

    async def pulls(self) -> list[Pulling]:
        return []  # each is over at once

    async def collect_images(self, collection: Collection) -> Collected:
        self._maybe_fail("collect_images")
        used = {box.image.id for box in self._boxes.values()}
        unused = [image for image, _ in self._images.values() if image.id not in used and "host" not in image.names]
        pulled = [image for image in unused if collection.imported or image.id.startswith("fake:pulled:")]
        going = pulled if collection.all else []
        if not collection.dry_run:
            gone = {image.id for image in going}
            self._images = {key: value for key, value in self._images.items() if value[0].id not in gone}
        return Collected(removed=[RemovedImage(id=image.id, names=image.names) for image in going])

    async def remove_image(self, name: str) -> None:
        image, _ = self._find_image(name)
        if any(box.image.id == image.id for box in self._boxes.values()):
            raise ConflictError(f"a sandbox runs on {name}", code="image_in_use", hint="end it first")
        self._images = {key: value for key, value in self._images.items() if value[0].id != image.id}

    async def close(self) -> None:
        pass

    # Inside.

    def _maybe_fail(self, call: str) -> None:
        if waiting := self._failures.get(call):
            raise waiting.pop(0)

    def _find_image(self, name: str) -> tuple[ImageInfo, dict[str, bytes]]:
        for key, (image, files) in self._images.items():
            if name in (key, image.id):
                return image, files
        raise NotFoundError(f"there is no image {name}", code="image_not_found", hint="sandmill image ls")

    def _box(self, sandbox_id: str) -> _Box:
        if (box := self._boxes.get(sandbox_id)) is not None:
            return box
        if sandbox_id in self._ends:
            raise self._gone(sandbox_id)
        raise NotFoundError(f"there is no sandbox {sandbox_id}", code="sandbox_not_found", status=404)

    def _gone(self, sandbox_id: str) -> SandboxGoneError:
        end = self._ends[sandbox_id]
        details = {"id": end.id, "cause": end.cause, "message": end.message, "ended_at": end.ended_at}
        return SandboxGoneError(f"sandbox {sandbox_id} has ended: {end.cause}", details=details, status=410)

    def _end(self, sandbox_id: str, cause: str, message: str) -> None:
        if self._boxes.pop(sandbox_id, None) is not None:
            end = SandboxEnd(id=sandbox_id, cause=cause, message=message, ended_at=self.now)
            self._ends[sandbox_id] = end
            self._events.append(end)
            self._changed.set()

    def _info(self, sandbox_id: str) -> SandboxInfo:
        box = self._boxes[sandbox_id]
        limits = box.spec.limits
        asked = {
            name: getattr(limits, name) for name in ("cpu", "memory_bytes", "pids", "disk_bytes", "inodes", "shm_bytes")
        }
        enforced = {name.removesuffix("_bytes"): "fake" for name, value in asked.items() if value is not None}
        return SandboxInfo(
            id=sandbox_id,
            state="running",
            image=box.image.id,
            created_at=box.created_at,
            started_at=box.created_at,
            expires_at=box.expires_at,
            limits=Limits(**asked, enforced_by=enforced),
            network={"mode": box.spec.network},
            env=box.image.config.env | box.spec.env,
            workdir=box.spec.workdir or box.image.config.workdir,
            user=box.spec.user or box.image.config.user,
        )


class FakeIO:
    """Implements `base.SandboxIO` on a FakeBackend."""

    def __init__(self, backend: FakeBackend, sandbox_id: str) -> None:
        self._backend = backend
        self._id = sandbox_id

    async def run(self, command: Exec) -> Result:
        box = self._use("run")
        text = command.shell if command.shell is not None else " ".join(command.argv or [])
        if (command.argv is None) == (command.shell is None):
            raise UsageError("a command has exactly one of argv and shell")
        if any("\0" in part for part in [text, *(command.env or {}).values()]):
            raise UsageError("a command can't hold a NUL", code="invalid_argument")
        for pattern, handler in self._backend._handlers:
            if pattern.search(text):
                return handler(command)
        cwd = command.cwd or box.spec.workdir or "/"
        if cwd != "/" and cwd not in box.directories:
            raise UsageError(f"there is no directory {cwd}", code="cwd_not_found")
        return self._execute(box, command, cwd)

    def _execute(self, box: _Box, command: Exec, cwd: str) -> Result:
        left = command.timeout_s or float("inf")
        spent = 0.0

        def sleep(seconds: float) -> bool:
            nonlocal left, spent
            passed = min(seconds, left)
            left -= passed
            spent += passed
            return passed >= seconds

        env = {"HOME": "/root", "PATH": "/usr/bin:/bin"} | box.image.config.env | box.spec.env | (command.env or {})
        shell = fake_shell.Shell(box.files, box.directories, cwd, env, command.stdin or b"", sleep)
        if command.argv is not None:
            if not shell.known(command.argv[0]):
                raise UsageError(f"there is no program {command.argv[0]}", code="command_not_found")
            out = shell.argv(command.argv)
        else:
            out = shell.run(command.shell or "")
        self._backend.advance(spent)
        stdout, stderr = Kept(command.output_limit_bytes), Kept(command.output_limit_bytes)
        stdout.add(bytes(out.stdout))
        stderr.add(bytes(out.stderr))
        whole = out.signal is None and not out.timed_out
        return Result(
            pid=fake_shell.PID,
            exit_code=out.exit_code if whole else None,
            signal=9 if out.timed_out else out.signal,
            reason="timeout" if out.timed_out else "exited" if whole else "signaled",
            stdout=stdout.bytes(),
            stderr=stderr.bytes(),
            stdout_cut=stdout.cut(),
            stderr_cut=stderr.cut(),
            duration_s=spent,
        )

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> None:
        box = self._use("write")
        if path in box.directories:
            raise UsageError(f"{path} is a directory", code="is_a_directory")
        fake_shell.add_directories(box.directories, path.rsplit("/", 1)[0])
        box.files[path] = data

    async def read(self, path: str) -> bytes:
        box = self._use("read")
        if path in box.directories:
            raise UsageError(f"{path} is a directory", code="is_a_directory")
        if path not in box.files:
            raise NotFoundError(f"there is no file {path}")
        return box.files[path]

    async def names(self, path: str) -> list[str]:
        box = self._use("names")
        if path != "/" and path not in box.directories:
            raise NotFoundError(f"there is no directory {path}")
        return fake_shell.names(box.files, box.directories, path)

    async def remove(self, path: str) -> None:
        box = self._use("remove")
        if not fake_shell.remove(box.files, box.directories, path):
            raise NotFoundError(f"there is no file {path}")

    async def close(self) -> None:
        pass

    def _use(self, call: str) -> _Box:
        self._backend._maybe_fail(call)
        box = self._backend._box(self._id)
        box.calls += 1
        if box.renew_on_use:
            box.expires_at = max(box.expires_at, self._backend.now + box.ttl_s)
        return box

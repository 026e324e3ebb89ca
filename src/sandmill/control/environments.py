"""Prepared environments: an image and steps, run once, kept as a layer under the hash of everything that went in.

Single flight: who asks for what is being prepared waits for it. A waiter that goes away doesn't stop the work that others
wait for; work that nobody waits for any more is stopped after GRACE_S. An environment is named only when all of its steps have
succeeded, so there is never half of one.
"""

import asyncio
import hashlib
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from sandmill.control import steps as kinds
from sandmill.control.node import Node
from sandmill.control.pulling import pulled
from sandmill.control.sandboxes import Sandboxes, View, Wanted
from sandmill.control.steps import Action, Step, StepIO
from sandmill.errors import NotFoundError, PreparationError, SandboxGoneError, SandmillError
from sandmill.wire import ImageInfo, Lease

FORMAT: Final = 2
"""Part of every hash: a new number makes all environments anew."""
LEASE_S: Final = 60.0
"""Of a preparation's sandbox, renewed while the work goes on: what a killed serve leaves ends within it."""
GRACE_S: Final = 15.0
AT_ONCE: Final = 4
"""Preparations that run at the same time; the others wait in order."""
LOG_LIMIT_BYTES: Final = 1024 * 1024
SIGN_OF_LIFE_S: Final = 2.0
"""How often who reads along hears something, be it nothing."""
SCRATCH: Final = "scratch"
"""The image with nothing in it, made when it is first asked for."""

OpenIO = Callable[[View], AbstractAsyncContextManager[StepIO]]
"""Opens the data path of a sandbox."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """More of the environment's configuration. `entrypoint` and `cmd` replace the image's, the others are added to it."""

    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    volumes: list[str] = []
    labels: dict[str, str] = {}


class PrepareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to prepare. `env`, `workdir` and `user` hold for the steps and become the environment's defaults."""

    image: str = "host"
    steps: list[Step] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    network: Literal["none", "all"] = "all"
    config: Config = Config()
    fresh: bool = False
    """Prepare it even if it is there; it then takes the other's place."""
    stream: bool = False
    """Answer with lines of JSON as it goes on: {"output": base64} and last {"prepared": …} or {"error": …}."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """`image` is what to make sandboxes from."""

    image: str
    cached: bool
    prepare_s: float
    log: str


@dataclass(eq=False)
class _Work:
    """A preparation under way."""

    task: "asyncio.Task[Prepared]"
    log: "Log"
    waiters: int = 0
    abandoned: asyncio.TimerHandle | None = None


@dataclass(frozen=True)
class Statistics:
    under_way: int
    waiters: int


@dataclass(eq=False)
class Environments:
    """All preparations of one server."""

    sandboxes: Sandboxes
    node: Node
    open_io: OpenIO
    _work: dict[str, _Work] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def __repr__(self) -> str:
        return f"<Environments {self.statistics()}>"

    def statistics(self) -> Statistics:
        return Statistics(len(self._work), sum(work.waiters for work in self._work.values()))

    async def prepare(self, request: PrepareRequest, listener: "Log | None" = None) -> Prepared:
        """The environment, prepared now or earlier. `listener` is told what the steps say.

        Raises PreparationError with the step and its output, UsageError for steps that can't be, NotFoundError for the image
        (and `content_needed` for content that was not sent along).
        """
        actions = [kinds.checked(step, number) for number, step in enumerate(request.steps)]
        base = await self._image(request.image)
        sources = {step.take.image for step in request.steps if step.take is not None}
        ids = {name: (await self._image(name)).id for name in sorted(sources)}
        request = msgspec.structs.replace(request, steps=[_by_id(step, ids) for step in request.steps])
        actions = [_of(action, step) for action, step in zip(actions, request.steps, strict=True)]
        name = f"env:{_hash(request, base.id)}"
        work = self._work.get(name)
        if work is None:
            if not request.fresh and await self._is_there(name):
                return Prepared(image=name, cached=True, prepare_s=0.0, log="")
            work = self._work.get(name)  # another may have begun while we asked
            if work is None:
                for action in actions:
                    if action.step.digest is not None and action.archive is None:
                        raise NotFoundError(
                            f"the content of step {action.number} is needed", code="content_needed", status=404
                        )
                work = self._begin(name, request, actions)
        if listener is not None:
            work.log.pass_on(listener)
        return await self._wait(work)

    def _begin(self, name: str, request: PrepareRequest, actions: list[Action]) -> _Work:
        log = Log()
        work = self._work[name] = _Work(asyncio.create_task(self._prepare(name, request, actions, log)), log)
        work.task.add_done_callback(lambda _: self._work.pop(name, None))
        return work

    async def _is_there(self, name: str) -> bool:
        try:
            await self.node.image(name)
        except NotFoundError:
            return False
        return True

    async def _image(self, name: str) -> ImageInfo:
        try:
            return await self.node.image(name)
        except NotFoundError:
            if name != SCRATCH:
                return await pulled(self.node, name)
        with tempfile.NamedTemporaryFile(suffix=".tar") as empty:
            with tarfile.open(empty.name, "w") as archive:
                root = tarfile.TarInfo(".")
                root.type, root.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(root)
            return await self.node.import_image(empty.name, SCRATCH, "tar")

    async def close(self) -> None:
        """Stops everything under way."""
        tasks = [work.task for work in self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, work: _Work) -> Prepared:
        if work.abandoned is not None:
            work.abandoned.cancel()
            work.abandoned = None
        work.waiters += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.waiters -= 1
            if work.waiters == 0 and not work.task.done():
                work.abandoned = asyncio.get_running_loop().call_later(GRACE_S, work.task.cancel)

    async def _prepare(self, name: str, request: PrepareRequest, actions: list[Action], log: "Log") -> Prepared:
        async with self._slots:
            began = time.monotonic()
            wanted = Wanted(
                image=request.image,
                env=request.env,
                workdir=request.workdir,
                user=request.user,
                network=request.network,
                lease=Lease(LEASE_S, False),
                metadata={"sandmill.preparation": name},
                plain_disk=True,
            )
            async with self._sandbox(wanted) as view:
                async with self.open_io(view) as box:
                    for action in actions:
                        await self._run(action, box, request, log)
                config = msgspec.to_builtins(request.config)
                config |= {"env": request.env, "workdir": request.workdir, "user": request.user}
                await self.sandboxes.commit(view.record.id, name, config)
            return Prepared(image=name, cached=False, prepare_s=time.monotonic() - began, log=log.text())

    @asynccontextmanager
    async def _other(self, image: str) -> AsyncIterator[StepIO]:
        """A sandbox to take files from."""
        wanted = Wanted(
            image=image, user="root", lease=Lease(LEASE_S, False), metadata={"sandmill.preparation": "source"}
        )
        async with self._sandbox(wanted) as view, self.open_io(view) as box:
            yield box

    @asynccontextmanager
    async def _sandbox(self, wanted: Wanted) -> AsyncIterator[View]:
        """A sandbox whose lease is renewed, and which is ended however the block ends."""
        view = await self.sandboxes.create(wanted)
        renewal = asyncio.create_task(self._keep(view.record.id))
        try:
            yield view
        finally:
            renewal.cancel()
            try:
                await self.sandboxes.kill(view.record.id)
            except SandmillError:
                pass  # committed, or gone: the error to see is the block's own

    async def _keep(self, sandbox_id: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            try:
                await self.sandboxes.renew(sandbox_id, LEASE_S)
            except SandboxGoneError:
                return
            except SandmillError:
                pass  # the node is away; tried again before the lease ends

    async def _run(self, action: Action, box: StepIO, request: PrepareRequest, log: "Log") -> None:
        log.line(f"[{action.number}] {action.about}")
        try:
            result = await kinds.carry_out(action, box, request.user, log.say, self._other)
            if result is not None and result.exit_code != 0:
                raise kinds.failed(action, result, log.text())
        except PreparationError:
            raise
        except SandmillError as error:
            raise PreparationError(
                f"step {action.number} ({action.about}) failed: {error.message}",
                hint=error.hint,
                details={
                    "step": action.number,
                    "about": action.about,
                    "how": error.message,
                    "error": error.as_wire(),
                    "log": log.text(),
                },
                retryable=error.retryable,
                status=422,
            ) from error


def _by_id(step: Step, ids: dict[str, str]) -> Step:
    if step.take is None:
        return step
    return msgspec.structs.replace(step, take=msgspec.structs.replace(step.take, image=ids[step.take.image]))


def _of(action: Action, step: Step) -> Action:
    return Action(action.number, action.about, step, action.files, action.archive)


class Log:
    """What the steps said: the latest part of it, and who reads along."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._readers: list[Log] = []

    def say(self, data: bytes) -> None:
        self._kept += data
        over = len(self._kept) - LOG_LIMIT_BYTES
        if over > LOG_LIMIT_BYTES // 4:  # not with every word
            del self._kept[:over]
            self._dropped += over
        self._changed.set()
        for reader in self._readers:
            reader.say(data)

    def line(self, text: str) -> None:
        """A line of its own."""
        ended = not self._kept or self._kept.endswith(b"\n")
        self.say(f"{'' if ended else chr(10)}{text}\n".encode())

    def text(self) -> str:
        return self._kept[-LOG_LIMIT_BYTES:].decode(errors="replace")

    def pass_on(self, reader: "Log") -> None:
        """From its beginning on."""
        reader.say(bytes(self._kept))
        self._readers.append(reader)

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is said, until it is closed; an empty piece every SIGN_OF_LIFE_S. Who reads slowly misses what is not kept."""
        at = 0
        while True:
            self._changed.clear()
            data = bytes(self._kept[max(0, at - self._dropped) :])
            at = self._dropped + len(self._kept)
            if data:
                yield data
            elif self._closed:
                return
            else:
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_S):
                        await self._changed.wait()
                except TimeoutError:
                    yield b""


def _hash(request: PrepareRequest, base_id: str) -> str:
    """Of all that goes in; images by their content, not by their names."""
    essence = msgspec.structs.replace(
        request, image=base_id, stream=False, fresh=False, steps=[kinds.essence(step) for step in request.steps]
    )
    content: Any = {"format": FORMAT, "request": essence}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:40]

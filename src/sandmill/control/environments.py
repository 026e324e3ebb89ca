"""Prepared environments: an image and steps, run once, kept as a layer under the hash of everything that went in.

Single flight: who asks for what is being prepared waits for it. A waiter that goes away doesn't stop the work that others
wait for; work that nobody waits for any more is stopped after GRACE_S. An environment is named only when all of its steps have
succeeded, so there is never half of one.
"""

import asyncio
import base64
import binascii
import hashlib
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from sandmill.control.node import Node
from sandmill.control.pulling import pulled
from sandmill.control.sandboxes import Sandboxes, View, Wanted
from sandmill.errors import NotFoundError, PreparationError, SandboxGoneError, SandmillError, UsageError
from sandmill.wire import Exec, ImageInfo, Lease, Result

FORMAT: Final = 1
"""Part of every hash: a new number makes all environments anew."""
LEASE_S: Final = 60.0
"""Of a preparation's sandbox, renewed while the work goes on: what a killed serve leaves ends within it."""
GRACE_S: Final = 15.0
AT_ONCE: Final = 4
"""Preparations that run at the same time; the others wait in order."""
STEP_S: Final = 3600.0
"""How long one step may take."""
OUTPUT_LIMIT_BYTES: Final = 256 * 1024
LOG_LIMIT_BYTES: Final = 1024 * 1024


class StepIO(Protocol):
    """What the steps do in their sandbox."""

    async def run(self, command: Exec) -> Result: ...

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> Any: ...

    async def write_tar(self, path: str, data: bytes, *, user: str | None = None) -> None: ...


OpenIO = Callable[[View], AbstractAsyncContextManager[StepIO]]
"""Opens the data path of a sandbox."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of a shell line, files by path (base64), or a tar (base64) to unpack into the directory `to`."""

    run: str | None = None
    copy: dict[str, str] | None = None
    tar: str | None = None
    to: str | None = None


class PrepareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to prepare. `env`, `workdir` and `user` hold for the steps and become the environment's defaults."""

    image: str = "host"
    steps: list[Step] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    network: Literal["none", "all"] = "all"


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

    async def prepare(self, request: PrepareRequest) -> Prepared:
        """The environment, prepared now or earlier.

        Raises PreparationError with the step and its output, UsageError for steps that can't be, NotFoundError for the image.
        """
        steps = [_checked(step, number) for number, step in enumerate(request.steps)]
        base = await self._base(request.image)
        name = f"env:{_hash(request, base.id)}"
        work = self._work.get(name)
        if work is None:
            try:
                await self.node.image(name)
                return Prepared(image=name, cached=True, prepare_s=0.0, log="")
            except NotFoundError:
                pass
            work = self._work.get(name)  # another may have begun while we asked
            if work is None:
                work = self._work[name] = _Work(asyncio.create_task(self._prepare(name, request, steps)))
                work.task.add_done_callback(lambda _: self._work.pop(name, None))
        return await self._wait(work)

    async def _base(self, name: str) -> ImageInfo:
        try:
            return await self.node.image(name)
        except NotFoundError:
            return await pulled(self.node, name)

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

    async def _prepare(self, name: str, request: PrepareRequest, steps: "list[_Action]") -> Prepared:
        async with self._slots:
            began = time.monotonic()
            log = _Log()
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
                    for action in steps:
                        await self._run(action, box, request, log)
                config = {"env": request.env, "workdir": request.workdir, "user": request.user}
                await self.sandboxes.commit(view.record.id, name, config)
            return Prepared(image=name, cached=False, prepare_s=time.monotonic() - began, log=log.text())

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

    async def _run(self, action: "_Action", box: StepIO, request: PrepareRequest, log: "_Log") -> None:
        log.say(f"[{action.number}] {action.about}\n".encode())
        try:
            if action.line is not None:
                command = Exec(shell=action.line, timeout_s=STEP_S, output_limit_bytes=OUTPUT_LIMIT_BYTES)
                result = await box.run(command)
                log.say(result.stdout + result.stderr)
                if result.exit_code != 0:
                    raise _failed(action, result, log)
            elif action.archive is not None:
                await box.write_tar(action.folder, action.archive, user=request.user)
            else:
                for path, content in action.files.items():
                    await box.write(path, content, user=request.user)
        except PreparationError:
            raise
        except SandmillError as error:
            raise PreparationError(
                f"step {action.number} ({action.about}) failed: {error.message}",
                hint=error.hint,
                details={"step": action.number, "about": action.about, "error": error.as_wire(), "log": log.text()},
                retryable=error.retryable,
                status=422,
            ) from error


@dataclass(frozen=True)
class _Action:
    """A step, decoded."""

    number: int
    about: str
    line: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    archive: bytes | None = None
    folder: str = "/"


class _Log:
    """What the steps said, the latest part of it."""

    def __init__(self) -> None:
        self._kept = io.BytesIO()

    def say(self, data: bytes) -> None:
        if data and not data.endswith(b"\n"):
            data += b"\n"
        whole = self._kept.getvalue() + data
        self._kept = io.BytesIO()
        self._kept.write(whole[-LOG_LIMIT_BYTES:])

    def text(self) -> str:
        return self._kept.getvalue().decode(errors="replace")


def _checked(step: Step, number: int) -> _Action:
    """Raises UsageError for a step that can't be."""
    given = [name for name in ("run", "copy", "tar") if getattr(step, name) is not None]
    where = f"steps[{number}]"
    if len(given) != 1:
        raise UsageError(
            f"{where} has {' and '.join(given) or 'nothing to do'}", hint="exactly one of run, copy and tar"
        )
    if step.to is not None and step.tar is None:
        raise UsageError(f"{where}: `to` belongs to tar")
    if step.run is not None:
        return _Action(
            number, f"run {step.run.strip().splitlines()[0][:120] if step.run.strip() else ''}", line=step.run
        )
    if step.copy is not None:
        files = {path: _decoded(content, f"{where}.copy[{path!r}]") for path, content in step.copy.items()}
        return _Action(number, f"copy {', '.join(sorted(files))[:120]}", files=files)
    assert step.tar is not None
    return _Action(
        number, f"tar to {step.to or '/'}", archive=_decoded(step.tar, f"{where}.tar"), folder=step.to or "/"
    )


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{where} is not base64: {error}") from error


def _hash(request: PrepareRequest, base_id: str) -> str:
    """Of all that goes in; the image by its content, not by its name."""
    content: Any = {"format": FORMAT, "base": base_id, "request": msgspec.structs.replace(request, image=base_id)}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:40]


def _failed(action: _Action, result: Result, log: _Log) -> PreparationError:
    how = {
        "timeout": f"took longer than {STEP_S:g} s",
        "oom": "ran out of memory",
    }.get(
        result.reason, f"ended with {result.exit_code if result.exit_code is not None else f'signal {result.signal}'}"
    )
    return PreparationError(
        f"step {action.number} ({action.about}) {how}",
        hint="details.log has the output of all steps",
        details={
            "step": action.number,
            "about": action.about,
            "reason": result.reason,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "stdout": result.stdout.decode(errors="replace"),
            "stderr": result.stderr.decode(errors="replace"),
            "log": log.text(),
        },
        status=422,
    )

"""Steps of a preparation: what a caller may ask for, checked before anything runs, and carried out in a sandbox.

Most are one of three: a command, files, a tar. What Dockerfiles need beyond these (owners, files of another image, a directory,
a program given as text) are fields and kinds of the same steps, so that whatever is prepared is prepared by one mechanism.
"""

import asyncio
import base64
import binascii
import fnmatch
import io
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import IO, Any, Final, Protocol

import msgspec

from sandmill.errors import NotFoundError, PreparationError, UsageError
from sandmill.sdk.filecalls import Entry
from sandmill.wire import Exec, Result

STEP_S: Final = 3600.0
"""How long one step may take."""
OUTPUT_LIMIT_BYTES: Final = 256 * 1024
SCRIPT: Final = "/dev/shm/sandmill-script"
"""Where a step's `script` lies while its command runs: not in the image."""
PART_BYTES: Final = 1024 * 1024
WILDCARDS: Final = frozenset("*?[")

Say = Callable[[bytes], object]
Parts = Iterable[bytes] | AsyncIterable[bytes]


class StepIO(Protocol):
    """What the steps do in their sandbox."""

    async def run_live(self, command: Exec, say: Say) -> Result:
        """Runs a command to its end; what it writes is said as it comes."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> Any: ...

    async def write_tar(
        self, path: str, data: bytes | Parts, *, user: str | None = None, keep_owners: bool = False
    ) -> None: ...

    def read_tar(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]: ...

    async def stat(self, path: str) -> Entry:
        """Links are followed. Raises NotFoundError."""
        ...

    async def names(self, path: str) -> list[str]: ...

    async def make_directory(self, path: str, *, user: str | None = None) -> None: ...

    async def remove(self, path: str) -> None: ...


class Take(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files and directories of another image; wildcards match within a name. A directory gives its content."""

    image: str
    paths: list[str]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of `run` (a shell line), `argv`, `copy` (files by path, base64), `tar` (base64; unpacked into the directory
    `to`), `take` (copied to `to`) and `mkdir`."""

    run: str | None = None
    argv: list[str] | None = None
    copy: dict[str, str] | None = None
    tar: str | None = None
    take: Take | None = None
    mkdir: str | None = None
    to: str | None = None
    """Of a tar and of a take. A take of one file goes to this name, unless that is a directory or ends in a slash."""
    env: dict[str, str] = {}
    """Of this command alone, as `cwd` and `user` are."""
    cwd: str | None = None
    user: str | None = None
    script: str | None = None
    """A text that lies at /dev/shm/sandmill-script while the command runs."""
    owner: str | None = None
    """Of what a tar, take or mkdir makes: as `user`, also `name:group`."""
    keep_owners: bool = False
    """Owners of a tar or take stay, by number."""
    mode: str | None = None
    """Octal digits: of all that a take makes."""
    single: str | None = None
    """Of a tar with one file: its name, should what the tar calls it be a directory; it goes into that one then."""
    digest: str | None = None
    """Stands for the content of `tar` in the environment's hash; with it a first request may leave `tar` out, and is answered
    with 404 `content_needed` if the content is needed."""
    about: str | None = None
    """What to call it in the log."""


@dataclass(frozen=True)
class Action:
    """A step, decoded."""

    number: int
    about: str
    step: Step
    files: dict[str, bytes] = field(default_factory=dict)
    archive: bytes | None = None


def essence(step: Step) -> Step:
    """What of a step goes into the hash."""
    return msgspec.structs.replace(step, about=None, tar=None if step.digest is not None else step.tar)


def checked(step: Step, number: int) -> Action:
    """Raises UsageError for a step that can't be."""
    kinds = ("run", "argv", "copy", "tar", "take", "mkdir")
    given = [name for name in kinds if getattr(step, name) is not None]
    if step.digest is not None and not given:
        given = ["tar"]  # its content comes if it is asked for
    where = f"steps[{number}]"
    if len(given) != 1:
        raise UsageError(
            f"{where} has {' and '.join(given) or 'nothing to do'}", hint=f"exactly one of {', '.join(kinds)}"
        )
    kind = given[0]
    for name, owners in (
        ("to", ("tar", "take")),
        ("env", ("run", "argv")),
        ("cwd", ("run", "argv")),
        ("user", ("run", "argv")),
        ("script", ("run", "argv")),
        ("owner", ("tar", "take", "mkdir")),
        ("keep_owners", ("tar", "take")),
        ("mode", ("take",)),
        ("single", ("tar",)),
        ("digest", ("tar",)),
    ):
        if getattr(step, name) and kind not in owners:
            raise UsageError(f"{where}: `{name}` belongs to {' and '.join(owners)}")
    if step.mode is not None and not (
        step.mode.isascii() and step.mode.isdigit() and set(step.mode) <= set("01234567")
    ):
        raise UsageError(f"{where}.mode is {step.mode!r}", hint="octal digits, such as 755")
    if step.argv is not None and not step.argv:
        raise UsageError(f"{where}.argv is empty")
    if step.take is not None and not (step.take.paths and step.to):
        raise UsageError(f"{where}: a take has paths, and a `to`")
    about = step.about or _about(step, kind)
    if step.copy is not None:
        files = {path: _decoded(content, f"{where}.copy[{path!r}]") for path, content in step.copy.items()}
        return Action(number, about, step, files=files)
    archive = _decoded(step.tar, f"{where}.tar") if step.tar is not None else None
    return Action(number, about, step, archive=archive)


def _about(step: Step, kind: str) -> str:
    if step.run is not None:
        return f"run {step.run.strip().splitlines()[0][:120] if step.run.strip() else ''}"
    if step.argv is not None:
        return f"run {' '.join(step.argv)[:120]}"
    if step.copy is not None:
        return f"copy {', '.join(sorted(step.copy))[:120]}"
    return f"{kind} to {step.mkdir or step.to or '/'}"


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{where} is not base64: {error}") from error


async def carry_out(
    action: Action, box: StepIO, user: str | None, say: Say, other: Callable[[str], AbstractAsyncContextManager[StepIO]]
) -> Result | None:
    """One step; gives the result of a command. `user` is the environment's own; `other` opens a sandbox of another image."""
    step = action.step
    if step.run is not None or step.argv is not None:
        return await _command(step, box, say)
    if step.owner is not None:
        # Fails if there is no such user. An upload would, too, but its answer can be lost while we still send.
        await box.make_directory("/", user=step.owner)
    if action.archive is not None:
        data = action.archive
        if step.single is not None:
            data = await _into_directory(data, step.single, box)
        owned = step.owner or ("root" if step.keep_owners else user)
        await box.write_tar(step.to or "/", data, user=owned, keep_owners=step.keep_owners and step.owner is None)
    elif step.take is not None:
        async with other(step.take.image) as source:
            await _take(step, step.take, source, box)
    elif step.mkdir is not None:
        await box.make_directory(step.mkdir, user=step.owner or user)
    else:
        for path, content in action.files.items():
            await box.write(path, content, user=user)
    return None


async def _command(step: Step, box: StepIO, say: Say) -> Result:
    command = Exec(
        shell=step.run,
        argv=step.argv,
        env=step.env or None,
        cwd=step.cwd,
        user=step.user,
        timeout_s=STEP_S,
        output_limit_bytes=OUTPUT_LIMIT_BYTES,
    )
    if step.script is None:
        return await box.run_live(command, say)
    await box.write(SCRIPT, step.script.encode(), mode=0o755, user="root")
    try:
        return await box.run_live(command, say)
    finally:
        await box.remove(SCRIPT)


async def _into_directory(archive: bytes, name: str, box: StepIO) -> bytes:
    """The archive of one file; if the name that it has there is a directory, the file goes into it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        member = members.getmembers()[0]
    if not await _is_directory(f"/{member.name}", box):
        return archive
    sink = io.BytesIO()
    _copy_members(io.BytesIO(archive), sink, lambda old: f"{old}/{name}", None)
    _end(sink)
    return sink.getvalue()


async def _is_directory(path: str, box: StepIO) -> bool:
    try:
        return (await box.stat(path)).is_dir
    except NotFoundError:
        return False


async def _take(step: Step, take: Take, source: StepIO, box: StepIO) -> None:
    assert step.to is not None
    found = [path for pattern in take.paths for path in await _matches(pattern, source)]
    kinds = [await source.stat(path) for path in found]
    base = step.to.strip("/")
    into = step.to.endswith("/") or len(found) > 1 or await _is_directory(step.to, box)
    mode = None if step.mode is None else int(step.mode, 8)
    with tempfile.TemporaryFile() as sink:
        for path, entry in zip(found, kinds, strict=True):
            if not (entry.is_dir or entry.is_file):
                raise UsageError(f"{path} is neither a file nor a directory, but a {entry.type}")
            leaf = posixpath.join(base, posixpath.basename(path.rstrip("/"))) if into else base
            rename = _below(base) if entry.is_dir else _always(leaf)
            with tempfile.TemporaryFile() as raw:
                async with source.read_tar(path) as parts:
                    async for part in parts:
                        raw.write(part)
                raw.seek(0)
                await asyncio.to_thread(_copy_members, raw, sink, rename, mode)
        _end(sink)
        sink.seek(0)
        keep = step.keep_owners and step.owner is None
        await box.write_tar("/", _pieces(sink), user=step.owner or "root", keep_owners=keep)


def _below(base: str) -> Callable[[str], str]:
    return lambda name: posixpath.normpath(posixpath.join(base, name)) if base or name != "." else "."


def _always(name: str) -> Callable[[str], str]:
    return lambda _: name


def _copy_members(source: IO[bytes], sink: IO[bytes], rename: Callable[[str], str], mode: int | None) -> None:
    """Adds an archive's members to an archive that is not ended yet, under other names."""
    with tarfile.open(fileobj=source, mode="r:") as members:
        # Never closed: the end of an archive is written once, by `_end`.
        out = tarfile.TarFile(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT)
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            member.name = rename(member.name)
            # A long name is in these headers as well, where it would win.
            member.pax_headers = {key: v for key, v in member.pax_headers.items() if key not in ("path", "linkpath")}
            if member.islnk():
                member.linkname = rename(member.linkname)
            if mode is not None and not member.issym():
                member.mode = mode
            out.addfile(member, content)


def _end(sink: IO[bytes]) -> None:
    sink.write(bytes(2 * tarfile.BLOCKSIZE))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while part := file.read(PART_BYTES):
        yield part


async def _matches(pattern: str, source: StepIO) -> list[str]:
    """Paths that a pattern names. Raises UsageError if there is none."""
    if not WILDCARDS & set(pattern):
        try:
            await source.stat(pattern)
        except NotFoundError as error:
            raise UsageError(f"{pattern} is not there", code="source_not_found") from error
        return [pattern]
    found = ["/"]
    for part in pattern.strip("/").split("/"):
        following = []
        for folder in found:
            if not WILDCARDS & set(part):
                following.append(posixpath.join(folder, part))
                continue
            try:
                names = await source.names(folder)
            except (NotFoundError, UsageError):
                continue  # no directory
            following += [posixpath.join(folder, name) for name in names if fnmatch.fnmatchcase(name, part)]
        found = following
    there = []
    for path in found:
        try:
            await source.stat(path)
        except (NotFoundError, UsageError):
            continue
        there.append(path)
    if not there:
        raise UsageError(f"nothing matches {pattern}", code="source_not_found")
    return there


def failed(action: Action, result: Result, log: str) -> PreparationError:
    """The error of a command that did not succeed."""
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
            "how": how,
            "reason": result.reason,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "stdout": result.stdout.decode(errors="replace"),
            "stderr": result.stderr.decode(errors="replace"),
            "log": log,
        },
        status=422,
    )

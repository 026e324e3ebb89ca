"""The folder that a Dockerfile copies from: what .dockerignore leaves of it, and its files as an archive with a digest."""

import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from e2b_dockerfile_utils import PatternMatcher

from sandmill.errors import UsageError

MOST_BYTES: Final = 180 * 1024 * 1024
"""What one instruction may copy: it travels in one request."""
ZSTD: Final = b"\x28\xb5\x2f\xfd"
WILDCARDS: Final = frozenset("*?[\\")


@dataclass(frozen=True)
class Item:
    """One entry of an archive. `content` is bytes, or the file that has them."""

    name: str
    info: tarfile.TarInfo
    content: Path | bytes | None = None


@dataclass
class Parcel:
    """What one COPY or ADD brings. Names are those in the image, without the leading slash."""

    items: list[Item] = field(default_factory=list)
    has_owners: bool = False
    """Whether owners are those of an archive (ADD), not root."""

    def digest(self) -> str:
        """Of names, kinds, modes, owners, links and bytes; not of times, as with Docker."""
        whole = hashlib.sha256()
        for item in self.items:
            info = item.info
            head = (item.name, info.type.decode("latin-1"), info.mode, info.uid, info.gid, info.linkname)
            whole.update(repr(head).encode("utf-8", "surrogateescape"))
            if info.isreg():
                whole.update(_content_digest(item))
        return whole.hexdigest()

    def archive(self) -> bytes:
        """All of it as a tar. Raises UsageError if it is too large, or a file is changed while it is read."""
        total = sum(item.info.size for item in self.items)
        if total > MOST_BYTES:
            raise UsageError(
                f"{total >> 20} MiB are to be copied; one instruction copies {MOST_BYTES >> 20} MiB at most",
                hint="leave out what is not needed with .dockerignore, or copy it in several instructions",
            )
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as out:
            for item in self.items:
                item.info.name = item.name
                if not item.info.isreg():
                    out.addfile(item.info)
                    continue
                content = item.content if isinstance(item.content, bytes) else _read(item)
                out.addfile(item.info, io.BytesIO(content))
        return sink.getvalue()


def _content_digest(item: Item) -> bytes:
    if isinstance(item.content, bytes):
        return hashlib.sha256(item.content).digest()
    assert item.content is not None
    with item.content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read(item: Item) -> bytes:
    assert isinstance(item.content, Path)
    content = item.content.read_bytes()
    if len(content) != item.info.size:
        raise UsageError(f"{item.content} changed while it was copied")
    return content


class Context:
    """A folder. `ignore` is the text of its .dockerignore."""

    def __init__(self, root: Path, ignore: str = "") -> None:
        self.root = root.resolve()
        try:
            self._ignored = PatternMatcher(ignore.removeprefix("\ufeff").splitlines())
        except ValueError as error:
            raise UsageError(f".dockerignore: {error}") from error
        self._walked: list[str] | None = None

    @staticmethod
    def open(root: Path, dockerfile: Path) -> "Context":
        """With the ignore file beside the Dockerfile (`NAME.dockerignore`), else the context's own. Raises UsageError."""
        if not root.is_dir():
            raise UsageError(f"there is no folder {root}", hint="the context is the folder that COPY copies from")
        for ignore in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), root / ".dockerignore"):
            if ignore.is_file():
                return Context(root, ignore.read_text(errors="surrogateescape"))
        return Context(root)

    def find(self, pattern: str) -> list[str]:
        """Paths in the context, relative to it, that a source names. Raises UsageError if there are none."""
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if ".." in parts:
            normal = posixpath.normpath("/".join(parts))
            if normal == ".." or normal.startswith("../"):
                raise UsageError(
                    f"{pattern} lies outside of the context", hint="only what is in the context can be copied"
                )
            parts = [part for part in normal.split("/") if part != "."]
        if not parts:
            return ["."]
        path = "/".join(parts)
        if not WILDCARDS & set(path):
            if os.path.lexists(self.root / path) and not self._is_out(path):
                return [path]
        else:
            try:
                names = [name_pattern(part) for part in parts]
            except (ValueError, re.error) as error:
                raise UsageError(f"{pattern} is no pattern: {error}") from error
            if found := [one for one in self.paths() if _fits(one.split("/"), names)]:
                return found
        raise UsageError(
            f"{pattern} is not in the context {self.root}"
            if not self._is_out(path)
            else f"{pattern} is left out by .dockerignore"
        )

    def paths(self) -> list[str]:
        """All that is not left out, in a fixed order, directories before what is in them."""
        if self._walked is None:
            self._walked = list(self._walk(""))
        return self._walked

    def place(self, path: str) -> Path:
        """The file or folder itself, links followed. Raises UsageError for one that leads out of the context."""
        real = (self.root / path).resolve()
        if real != self.root and self.root not in real.parents:
            raise UsageError(f"{path} is a link that leads out of the context")
        if not real.exists():
            raise UsageError(f"{path} is a link that leads nowhere")
        return real

    def tree(self, path: str, base: str) -> Iterator[Item]:
        """A folder's content as entries below `base`."""
        real = self.place(path)
        prefix = "" if real == self.root else f"{real.relative_to(self.root).as_posix()}/"
        if base and (folder := _item(real, base)):
            yield folder
        for one in self.paths() if self._covers(prefix) else self._walk(prefix.rstrip("/")):
            if one.startswith(prefix) and (item := _item(self.root / one, posixpath.join(base, one[len(prefix) :]))):
                yield item

    def file(self, path: str, name: str) -> Item:
        """One file under another name. Raises UsageError for what is neither a file nor a folder."""
        item = _item(self.place(path), name)
        if item is None or not item.info.isreg():
            raise UsageError(f"{path} is neither a file nor a folder")
        return item

    def _covers(self, prefix: str) -> bool:
        return not prefix or not self._is_out(prefix.rstrip("/"))

    def _is_out(self, path: str) -> bool:
        return self._ignored.matches(path) and not (
            (self.root / path).is_dir() and self._ignored.may_match_under(path) and any(self._walk(path))
        )

    def _walk(self, folder: str) -> Iterator[str]:
        with os.scandir(self.root / folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            path = f"{folder}/{entry.name}" if folder else entry.name
            out = self._ignored.matches(path)
            if not entry.is_dir(follow_symlinks=False):
                if not out:
                    yield path
                continue
            if out and not self._ignored.may_match_under(path):
                continue
            below = self._walk(path)
            if not out:
                yield path
                yield from below
            elif (first := next(below, None)) is not None:
                yield path
                yield first
                yield from below


def _item(path: Path, name: str) -> Item | None:
    """As an entry of an archive; None for what can't be one (sockets, devices)."""
    found = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = int(found.st_mtime)
    if stat.S_ISREG(found.st_mode):
        info.size = found.st_size
        return Item(name, info, path)
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        return Item(name, info)
    if stat.S_ISLNK(found.st_mode):
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = os.readlink(path)
        return Item(name, info)
    return None


def text_item(name: str, content: bytes) -> Item:
    """A file that is written in the Dockerfile."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), 0o644, int(time.time())
    return Item(name, info, content)


def archive_items(path: Path, base: str) -> list[Item] | None:
    """What a local archive (plain, gzip, bzip2, xz) holds, below `base`; None if it is none.

    Raises UsageError for a kind that can't be unpacked, and for names that lead out of it.
    """
    with path.open("rb") as file:
        if file.read(4) == ZSTD:
            raise UsageError(f"{path.name}: zstd archives are not unpacked", hint="unpack it first, or use COPY")
    try:
        with tarfile.open(path) as archive:
            items = []
            for member in archive:
                name = posixpath.normpath(posixpath.join(base, member.name.lstrip("/")))
                if ".." in member.name.split("/"):
                    raise UsageError(f"{path.name}: its entry {member.name} leads out of it")
                stream = archive.extractfile(member) if member.isreg() else None
                member.pax_headers = {k: v for k, v in member.pax_headers.items() if k not in ("path", "linkpath")}
                if member.islnk():
                    member.linkname = posixpath.normpath(posixpath.join(base, member.linkname.lstrip("/")))
                if not (member.isdev() and not member.isfifo()):
                    items.append(Item(name, member, stream.read() if stream is not None else None))
            return items
    except (tarfile.ReadError, EOFError):
        return None


def _fits(path: list[str], names: list[re.Pattern[str]]) -> bool:
    return len(path) == len(names) and all(name.fullmatch(part) for name, part in zip(names, path, strict=True))


def name_pattern(pattern: str) -> re.Pattern[str]:
    """One name's pattern, as Go's filepath.Match reads it. Raises ValueError."""
    made = ""
    rest = pattern
    while rest:
        char, rest = rest[0], rest[1:]
        if char == "*":
            made += ".*"
        elif char == "?":
            made += "."
        elif char == "[":
            one, rest = _class(rest)
            made += one
        else:
            char, rest = _char(char + rest)
            made += re.escape(char)
    return re.compile(made, re.DOTALL)


def _class(rest: str) -> tuple[str, str]:
    """What follows a `[`, as a regular expression, and what comes after its `]`."""
    negated = rest.startswith("^")
    rest = rest[negated:]
    made = ""
    while rest and not (made and rest[0] == "]"):
        if rest[0] in "]-":
            raise ValueError(f"{rest[0]} stands alone in a class of characters")
        low, rest = _char(rest)
        high = low
        if rest.startswith("-"):
            high, rest = _char(rest[1:])
        made += f"{re.escape(low)}-{re.escape(high)}"
    if not rest:
        raise ValueError("a class of characters has no end")
    return f"[{'^' if negated else ''}{made}]", rest[1:]


def _char(rest: str) -> tuple[str, str]:
    """The next character, its escape taken away, and what comes after it."""
    rest = rest[1:] if rest.startswith("\\") else rest
    if not rest:
        raise ValueError("it ends with an escape")
    return rest[0], rest[1:]

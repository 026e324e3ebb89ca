"""sandboxd's file calls as data, and what they give back."""

import os
from typing import Any, TypeVar

import msgspec

from sandmill.sdk import calls, http1

T = TypeVar("T")


class FileName(str):
    """A name or path in a sandbox. Bytes that aren't UTF-8 are surrogate escapes, as in `os.fsdecode`: `os.fsencode` gives
    the exact bytes, and passing it back to a call does too."""

    __slots__ = ()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a directory, as `lstat` sees it.

    `target` is the text of a link.
    """

    name: FileName
    path: FileName
    type: str
    """file, directory, symlink, fifo, socket, char_device, block_device or unknown."""
    size_bytes: int
    mode: int
    """Permission bits, with set-uid, set-gid and sticky."""
    uid: int
    gid: int
    owner: str
    group: str
    modified_at: float
    inode: int = 0
    links: int = 1
    target: FileName | None = None

    @property
    def is_dir(self) -> bool:
        return self.type == "directory"

    @property
    def is_file(self) -> bool:
        return self.type == "file"


class Listing(msgspec.Struct):
    entries: list[Entry]
    truncated: bool


class Removed(msgspec.Struct):
    removed: int


class Target(msgspec.Struct):
    target: FileName


Path = str | bytes | os.PathLike[str]


def name_of(path: Path) -> str | bytes:
    """A name as it goes over the wire: text, or bytes where it isn't UTF-8."""
    name = os.fspath(path)
    if isinstance(name, str) and not name.isascii():
        raw = os.fsencode(name)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw
    return name


def decode_name(kind: type, value: object) -> object:
    """msgspec's hook for FileName."""
    if kind is FileName and isinstance(value, (str, bytes)):
        return FileName(os.fsdecode(value))
    raise NotImplementedError(kind)


def fs(op: str, path: Path, kind: type[T], *, idempotent: bool = True, **fields: Any) -> calls.Call[T]:
    body = {"op": op, "path": name_of(path)} | {name: value for name, value in fields.items() if value is not None}
    return calls.post("fs", body, kind, idempotent=idempotent, hook=decode_name)


def target(call: str, path: Path, **fields: object) -> str:
    """The target of a call that names its file in the query."""
    return f"{calls.PREFIX}{call}?{calls.query(path=name_of(path), **fields)}"


def put(where: str, data: bytes) -> calls.Call[Entry]:
    """Writes a whole file in one request; `where` is its `target`."""
    return calls.Call(http1.request("PUT", where, calls.RAW, data), Entry, True, decode_name)


def get(call: str, path: Path, **fields: object) -> bytes:
    return http1.request("GET", target(call, path, **fields), calls.HEADERS, None)

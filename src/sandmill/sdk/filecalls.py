"""sandboxd's file calls as data, and what they give back."""

import os
from typing import Any, TypeVar

import msgspec

from sandmill.sdk import calls

T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a directory, as `lstat` sees it.

    Names that aren't UTF-8 come as `bytes`. `target` is the text of a link.
    """

    name: str | bytes
    path: str | bytes
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
    target: str | bytes | None = None

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
    target: str | bytes


Path = str | bytes | os.PathLike[str]


def name_of(path: Path) -> str | bytes:
    return os.fspath(path)


def fs(op: str, path: Path, kind: type[T], *, idempotent: bool = True, **fields: Any) -> calls.Call[T]:
    body = {"op": op, "path": name_of(path)} | {name: value for name, value in fields.items() if value is not None}
    return calls.post("fs", body, kind, idempotent=idempotent)


def target(call: str, path: Path, **fields: object) -> str:
    """The target of a call that names its file in the query."""
    return f"{calls.PREFIX}{call}?{calls.query(path=name_of(path), **fields)}"


def get(call: str, path: Path, **fields: object) -> bytes:
    from sandmill.sdk import http1

    return http1.request("GET", target(call, path, **fields), calls.HEADERS, None)

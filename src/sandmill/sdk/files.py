"""Files of a sandbox (blocking)."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path as LocalPath
from typing import IO

from sandmill.errors import NotFoundError, UsageError
from sandmill.sdk import calls
from sandmill.sdk.channel import Channel
from sandmill.sdk.filecalls import (
    Entry,
    FileName,
    Listing,
    Path,
    Removed,
    Target,
    decode_name,
    fs,
    get,
    name_of,
    put,
    target,
)

PART_BYTES = 1024 * 1024


class Files:
    """Files of one sandbox: `sandbox.files`.

    Paths are absolute, or relative to the sandbox's working directory; `~` is the home of the user. Calls act as root of the
    sandbox; what they make belongs to `user` (default: the sandbox's). All raise NotFoundError for what isn't there,
    UsageError for what can't be (a directory read as a file, a pipe: `not_a_regular_file`), SandboxGoneError.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def read(self, path: Path, *, offset: int | None = None, length: int | None = None) -> bytes:
        """The bytes of a file, or `length` of them from `offset`."""
        with self._channel.stream(get("files", path, offset=offset, length=length)) as (_, parts):
            return b"".join(parts)

    def read_text(self, path: Path, encoding: str = "utf-8") -> str:
        return self.read(path).decode(encoding)

    @contextmanager
    def stream(self, path: Path) -> Iterator[Iterator[bytes]]:
        """A file of any size, piece by piece."""
        with self._channel.stream(get("files", path)) as (_, parts):
            yield parts

    def write(
        self,
        path: Path,
        data: bytes | str | IO[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = True,
    ) -> Entry:
        """Writes a whole file: readers see the old one or the new one, never a part; an error leaves the old one.

        Mode and owner of an existing file stay unless given. Missing directories are made, owned by the user.
        """
        where = target("files", path, mode=None if mode is None else f"{mode:o}", user=user, parents=int(parents))
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, (bytes, bytearray, memoryview)):
            return self._channel.call(put(where, bytes(data)))
        parts = iter(lambda: data.read(PART_BYTES), b"") if hasattr(data, "read") else iter(data)
        _, body = self._channel.upload(where, parts, None)
        return calls.decode(body, Entry, decode_name)

    def stat(self, path: Path, *, follow: bool = False) -> Entry:
        return self._channel.call(fs("stat", path, Entry, follow=follow))

    def exists(self, path: Path) -> bool:
        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True

    def list(self, path: Path, *, depth: int = 1) -> list[Entry]:
        """Entries of a directory, sorted by name; deeper levels follow their directory."""
        return self._channel.call(fs("list", path, Listing, depth=depth)).entries

    def mkdir(self, path: Path, *, mode: int = 0o755, user: str | None = None, exist_ok: bool = True) -> Entry:
        """Makes a directory and the missing ones above it."""
        return self._channel.call(fs("mkdir", path, Entry, mode=mode, user=user, exist_ok=exist_ok))

    def move(self, path: Path, to: Path, *, overwrite: bool = True) -> Entry:
        return self._channel.call(fs("move", path, Entry, idempotent=False, to=name_of(to), overwrite=overwrite))

    def remove(self, path: Path, *, missing_ok: bool = False) -> int:
        """Removes a file, or a directory with all in it, never following a link. Gives the number of entries removed."""
        return self._channel.call(fs("remove", path, Removed, idempotent=False, missing_ok=missing_ok)).removed

    def chmod(self, path: Path, mode: int, *, recursive: bool = False) -> Entry:
        return self._channel.call(fs("chmod", path, Entry, mode=mode, recursive=recursive))

    def chown(self, path: Path, owner: str, *, recursive: bool = False) -> Entry:
        """`owner` is a name, a uid or `uid:gid`."""
        return self._channel.call(fs("chown", path, Entry, owner=owner, recursive=recursive))

    def symlink(self, path: Path, to: Path) -> Entry:
        """Makes a link at `path` that says `to`."""
        return self._channel.call(fs("symlink", path, Entry, idempotent=False, target=name_of(to)))

    def readlink(self, path: Path) -> FileName:
        return self._channel.call(fs("readlink", path, Target)).target

    def upload(self, local: str | os.PathLike[str], path: Path, *, user: str | None = None) -> None:
        """Uploads a file to `path`, or a folder's content into the directory `path`: types, modes and links stay."""
        source = LocalPath(local)
        if source.is_dir() and not source.is_symlink():
            from sandmill.sdk.archive import tar_of  # tarfile is slow to import, and rarely needed

            self._channel.upload(target("tar", path, user=user), tar_of(source), None)
            return
        if not source.is_file():
            raise UsageError(f"{source} is neither a file nor a folder")
        with source.open("rb") as stream:
            self.write(path, stream, mode=source.stat().st_mode & 0o7777, user=user)

    def download(self, path: Path, local: str | os.PathLike[str]) -> None:
        """Downloads a file, or a directory's content into the folder `local`: types, modes and links stay."""
        goal = LocalPath(local)
        if not self.stat(path, follow=True).is_dir:
            with self._channel.stream(get("files", path)) as (_, parts), goal.open("wb") as out:
                for part in parts:
                    out.write(part)
            return
        from sandmill.sdk.archive import unpack

        goal.mkdir(parents=True, exist_ok=True)
        with self._channel.stream(get("tar", path)) as (_, parts):
            unpack(parts, goal)

    def write_tar(self, path: Path, parts: Iterable[bytes], *, user: str | None = None) -> None:
        """Unpacks a tar stream into the directory `path`."""
        self._channel.upload(target("tar", path, user=user), parts, None)

    @contextmanager
    def read_tar(self, path: Path) -> Iterator[Iterator[bytes]]:
        """A directory as a tar stream."""
        with self._channel.stream(get("tar", path)) as (_, parts):
            yield parts

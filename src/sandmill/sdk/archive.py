"""Folders of this machine as tar streams, both ways, in constant memory."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path as LocalPath

PART_BYTES = 1024 * 1024


def tar_of(folder: LocalPath) -> Iterator[bytes]:
    """A folder's content as a tar stream, entry by entry, in constant memory."""
    sink = _Sink()
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=PART_BYTES) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False)
            yield sink.take()
    yield sink.take()


class _Sink(io.RawIOBase):
    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        self._data += view
        return len(view)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _Source(io.RawIOBase):
    """The pieces of a stream as a readable file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = part
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack(parts: Iterator[bytes], folder: LocalPath) -> None:
    """Unpacks a tar that a sandbox made: nothing of it lands outside `folder`, whatever it says."""
    stream = io.BufferedReader(_Source(parts), PART_BYTES)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extraction_filter = _inside
        archive.extractall(folder)
    for _ in parts:
        pass


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Python's own `tar` filter (no absolute names, nothing outside) that keeps modes and links, and drops devices."""
    if member.ischr() or member.isblk():
        return None
    return tarfile.tar_filter(member, folder)

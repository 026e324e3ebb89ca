"""Output that is handed over live and kept as well: what is kept of it is bounded as sandboxd bounds it."""

from collections import deque
from collections.abc import Callable

import msgspec

from sandmill.sdk.process import Output
from sandmill.wire import Result

DEFAULT_LIMIT_BYTES = 16 << 20
"""As sandboxd's."""

Listener = Callable[[bytes], object]


class Kept:
    """The first and the last half of `limit_bytes` (None: the default) of a stream."""

    def __init__(self, limit_bytes: int | None) -> None:
        limit = DEFAULT_LIMIT_BYTES if limit_bytes is None else limit_bytes
        self._first_most = limit - limit // 2
        self._last_most = limit // 2
        self._first = bytearray()
        self._last: deque[bytes] = deque()
        self._last_bytes = 0
        self._missing = 0

    def add(self, data: bytes) -> None:
        room = self._first_most - len(self._first)
        self._first += data[:room]
        if rest := data[room:]:
            self._last.append(rest)
            self._last_bytes += len(rest)
        while (over := self._last_bytes - self._last_most) > 0:
            oldest = self._last.popleft()
            dropped = min(over, len(oldest))
            if dropped < len(oldest):
                self._last.appendleft(oldest[dropped:])
            self._last_bytes -= dropped
            self._missing += dropped

    def bytes(self) -> bytes:
        return bytes(self._first) + b"".join(self._last)

    def cut(self) -> tuple[int, int] | None:
        """Where bytes are missing, and how many."""
        return (len(self._first), self._missing) if self._missing else None


class Live:
    """Both streams of one command: each piece goes to its listener and is kept."""

    def __init__(self, limit_bytes: int | None, on_stdout: Listener | None, on_stderr: Listener | None) -> None:
        self._streams = {"stdout": (Kept(limit_bytes), on_stdout), "stderr": (Kept(limit_bytes), on_stderr)}

    def take(self, piece: Output) -> object:
        """Gives what the listener gave."""
        kept, listener = self._streams[piece.stream]
        kept.add(piece.data)
        return None if listener is None else listener(piece.data)

    def result(self, end: Result) -> Result:
        """The result of the process, with the output that was read."""
        stdout, stderr = self._streams["stdout"][0], self._streams["stderr"][0]
        return msgspec.structs.replace(
            end, stdout=stdout.bytes(), stderr=stderr.bytes(), stdout_cut=stdout.cut(), stderr_cut=stderr.cut()
        )

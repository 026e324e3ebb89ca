"""A process that runs on its own, and a shell that lasts between commands (blocking)."""

from collections.abc import Iterator
from types import TracebackType
from typing import Literal

import msgspec

from sandmill.errors import SandmillError
from sandmill.sdk import calls
from sandmill.sdk.channel import Channel
from sandmill.wire import Result


class Output(msgspec.Struct, frozen=True):
    """A piece of output. `missing_bytes` > 0: the reader fell behind, and this many bytes before `data` are gone."""

    stream: Literal["stdout", "stderr", "pty"]
    data: bytes
    offset: int
    missing_bytes: int = 0


STREAMS: dict[str, Literal["stdout", "stderr", "pty"]] = {"o": "stdout", "e": "stderr", "p": "pty"}


class Process:
    """A process that `Sandbox.start` or `Sandbox.attach` gave. It lives on when this object is forgotten."""

    def __init__(self, channel: Channel, pid: int, *, paced: bool = False) -> None:
        self._channel = channel
        self._paced = paced
        self.pid = pid
        self.result: Result | None = None
        """How it ended, once `output` or `wait` has seen the end (without output)."""
        self._stdout_offset = 0
        self._stderr_offset = 0

    def __repr__(self) -> str:
        return f"<Process {self.pid} {'running' if self.result is None else self.result.reason}>"

    def output(self, *, stdout_offset: int | None = None, stderr_offset: int | None = None) -> Iterator[Output]:
        """Its output from the given byte offsets (default: where this object stopped reading), then live to its end.

        On a terminal all output is `pty`, counted by `stdout_offset`.
        """
        first = self._stdout_offset if stdout_offset is None else stdout_offset
        second = self._stderr_offset if stderr_offset is None else stderr_offset
        frames = calls.Frames()
        gaps: dict[str, int] = {}
        with self._channel.stream(calls.output(self.pid, first, second, self._paced)) as (_, parts):
            for part in parts:
                for frame in frames.feed(part):
                    kind = frame["t"]
                    if kind in STREAMS:
                        yield self._seen(kind, frame["off"], frame["d"], gaps.pop(kind, 0))
                    elif kind == "gap":
                        gaps[frame["s"]] = gaps.get(frame["s"], 0) + frame["n"]
                    elif kind == "end":
                        self.result = calls.result_of(frame["r"])

    def _seen(self, kind: str, offset: int, data: bytes, missing: int) -> Output:
        end = offset + len(data)
        if kind == "e":
            self._stderr_offset = end
        else:
            self._stdout_offset = end
        return Output(STREAMS[kind], data, offset, missing)

    def write(self, data: bytes | str) -> None:
        """Writes to its stdin (or terminal); waits while it doesn't read."""
        self._channel.call(calls.stdin(self.pid, data.encode() if isinstance(data, str) else data, False))

    def close_stdin(self) -> None:
        self._channel.call(calls.stdin(self.pid, b"", True))

    def signal(self, number: int, *, tree: bool = False) -> None:
        """Sends a signal to it, or to everything it started."""
        self._channel.call(calls.signal(self.pid, number, tree))

    def resize(self, rows: int, cols: int) -> None:
        """Resizes its terminal."""
        self._channel.call(calls.resize(self.pid, rows, cols))

    def wait(self, timeout_s: float | None = None) -> Result:
        """Waits for its end.

        Raises:
            TransportError: code `wait_timeout`, if it still runs after `timeout_s`.
        """
        self.result = self._channel.call(calls.wait(self.pid, timeout_s), timeout_s)
        return self.result

    def kill(self) -> Result:
        """Ends it and everything it started."""
        self.result = self._channel.call(calls.kill(self.pid))
        return self.result


class Session:
    """A shell whose directory, environment, functions and jobs last from one `run` to the next; `Sandbox.session()`.

    One command at a time. A command that ends the shell (`exit`, `exec`) is a result with `session_alive` false; the
    session is over then, and a new one can be opened.
    """

    def __init__(self, channel: Channel, sid: str, pid: int) -> None:
        self._channel = channel
        self.id = sid
        self.pid = pid

    def run(self, line: str, *, timeout_s: float | None = None, output_limit_bytes: int | None = None) -> Result:
        """Runs a line (or many) in the shell. A timeout ends what the line started, and the shell lives on if it answers."""
        return self._channel.call(calls.session_run(self.id, line, timeout_s, output_limit_bytes), timeout_s)

    def close(self) -> None:
        """Ends the shell and everything it started."""
        try:
            self._channel.call(calls.close_session(self.id))
        except SandmillError:
            pass  # gone already, with its sandbox or by itself

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

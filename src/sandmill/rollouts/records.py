"""One record an attempt, appended to DIR/records.jsonl as soon as it is known."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from sandmill.errors import ConflictError, UsageError
from sandmill.wire.data import CallUsage

FILE = "records.jsonl"


class Key(NamedTuple):
    """Which attempt: the same key in a second run is the same attempt."""

    task: str
    task_hash: str
    agent: str
    grading: str
    attempt: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no reward (rollouts/failures.py lists the types). `cause`: why a sandbox ended."""

    type: str
    code: str
    message: str
    retryable: bool
    cause: str | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: waiting for a place; preparing the environment (shared by those who wait for it) and making the sandbox;
    the agent; the grading, with its own sandbox; ending sandboxes."""

    queue_s: float = 0.0
    prepare_s: float = 0.0
    run_s: float = 0.0
    grade_s: float = 0.0
    clean_s: float = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended: the agent's, or the verifier's."""

    exit_code: int | None
    signal: int | None
    reason: str
    """exited, signaled, timeout, killed or oom."""
    duration_s: float
    usage: CallUsage


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt's sandbox consumed until the agent was done."""

    cpu_s: float
    memory_peak_bytes: int
    io_read_bytes: int
    io_write_bytes: int
    disk_bytes: int | None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Exactly one of `reward` and `error` is null."""

    task: str
    task_hash: str
    agent: str
    grading: str
    """fresh or in-place."""
    attempt: int
    """From 0."""
    reward: float | None
    rewards: dict[str, float] = {}
    """All that the verifier gave, by name."""
    error: Failure | None
    times: Times
    started_at: float
    ended_at: float
    """Unix seconds."""
    tries: int = 1
    sandbox: str | None = None
    agent_end: Ending | None = None
    """null: the agent ran nothing, or did not get to its end."""
    agent_timed_out: bool = False
    verifier_end: Ending | None = None
    usage: Spent | None = None

    @property
    def key(self) -> Key:
        return Key(self.task, self.task_hash, self.agent, self.grading, self.attempt)


class RecordLog:
    """DIR/records.jsonl. One run at a time: the file is locked while it is open.

    Raises UsageError when DIR can't be written, ConflictError when another run has it open.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                _set_aside(self.path)
            self._file: IO[bytes] = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"can't write to {folder}: {error.strerror}", hint="give another --out") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConflictError(
                f"another run is writing to {folder}", hint="wait for it, or give another --out"
            ) from error

    def read(self) -> list[Record]:
        """The records so far, in order. A last line that was cut off (the run was killed while writing) is removed."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        return list(_decode(self.path, data[:whole]))

    def append(self, record: Record) -> None:
        """Writes one record; it is in the file (not only in a buffer of ours) on return."""
        line = msgspec.json.encode(record) + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "RecordLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decode(path: Path, data: bytes) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(data.splitlines(), 1):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            what = f"{path}: line {number} is not a record: {error}"
            raise UsageError(what, hint="move the file away, or use --fresh, which does") from error


def _set_aside(path: Path) -> None:
    """Renames an earlier file; records are never deleted."""
    number = 1
    while (aside := path.with_name(f"records.{number}.jsonl")).exists():
        number += 1
    try:
        path.rename(aside)
    except FileNotFoundError:
        pass

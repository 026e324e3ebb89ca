"""What serve remembers of sandboxes: metadata, tokens, idempotency keys, and why they ended.

noded is the truth about what runs; this is the truth about what it was made for. A create is on record before its client hears
of it: what a crash leaves without a record is ended at the next start, and nobody misses it. An end may wait for the next
write, since noded remembers it too. What waits for the disk (the checkpoint) runs in a thread of its own.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from sandmill.errors import UsageError
from sandmill.wire import SandboxEnd

CHECKPOINT_AFTER: Final = 2000
"""Writes between two checkpoints of the log."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox was made as. Times are unix seconds."""

    id: str
    image: str
    token: str
    created_at: float
    network: str = "none"
    metadata: dict[str, str] = {}
    name: str | None = None
    template: str | None = None
    """Its E2B template, of those made in E2B's dialect."""
    internet_asked: bool | None = None
    """E2B's allow_internet_access, as it was given."""
    workdir: str | None = None
    user: str | None = None
    key: str | None = None
    """The idempotency key of its create."""
    fingerprint: str | None = None
    """Of the create's body: the same key with another one is a conflict."""


class Kept(msgspec.Struct, frozen=True):
    """A record as found in the store."""

    record: Record
    end: SandboxEnd | None


class Store(Protocol):
    """Durable across a crash of serve. Not thread-safe: the event loop owns it."""

    def load(self) -> list[Kept]:
        """Everything, oldest first."""
        ...

    def add(self, record: Record) -> None:
        """On record when this returns, with all that was told before."""
        ...

    def end(self, end: SandboxEnd) -> None:
        """Keeps the tombstone with the record; on record with the next `add`, or `flush`."""
        ...

    def flush(self) -> None:
        """All that was told is on record when this returns."""
        ...

    def forget(self, ids: Iterable[str]) -> None:
        """Drops records and tombstones."""
        ...

    def close(self) -> None: ...


MIGRATIONS: Final = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        created_at REAL NOT NULL,
        record BLOB NOT NULL,
        "end" BLOB
    ) WITHOUT ROWID;
    """,
)
"""One entry a version; never changed, only added to."""

INSERT: Final = "INSERT INTO sandboxes (id, created_at, record) VALUES (?, ?, ?)"

_encode = msgspec.json.Encoder().encode
_record = msgspec.json.Decoder(Record)
_end = msgspec.json.Decoder(SandboxEnd)


class SqliteStore:
    """The store in one SQLite file."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it. Raises UsageError when it can't be used."""
        self._path = path
        self._writes = 0
        self._ends: list[SandboxEnd] = []
        self._checkpoint: threading.Thread | None = None
        try:
            # Threads: opened and used by the event loop's only.
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            path.chmod(0o600)
            self._migrate()
        except sqlite3.Error as error:
            raise UsageError(
                f"{path} can't be used: {error}",
                code="store_unusable",
                hint="move it away to start with an empty one; sandboxes that still run are then ended",
            ) from error

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise UsageError(
                f"{self._path} was written by a newer version of sandmill",
                code="store_unusable",
                hint="upgrade sandmill, or use another state directory",
            )
        for number in range(version, len(MIGRATIONS)):
            self._db.executescript(f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")

    def load(self) -> list[Kept]:
        self.flush()
        rows = self._db.execute('SELECT record, "end" FROM sandboxes ORDER BY created_at, id')
        return [Kept(_record.decode(record), None if end is None else _end.decode(end)) for record, end in rows]

    def add(self, record: Record) -> None:
        row = (record.id, record.created_at, _encode(record))
        if not self._ends:
            self._db.execute(INSERT, row)
            self._written()
            return
        with self._transaction():
            self._write_ends()
            self._db.execute(INSERT, row)

    def end(self, end: SandboxEnd) -> None:
        self._ends.append(end)

    def flush(self) -> None:
        if self._ends:
            with self._transaction():
                self._write_ends()

    def forget(self, ids: Iterable[str]) -> None:
        with self._transaction():
            self._write_ends()
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", [(one,) for one in ids])

    def close(self) -> None:
        self.flush()
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._db.close()

    def _write_ends(self) -> None:
        self._db.executemany(
            'UPDATE sandboxes SET "end" = ? WHERE id = ?', [(_encode(end), end.id) for end in self._ends]
        )
        self._ends.clear()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        self._written()

    def _written(self) -> None:
        self._writes += 1
        if self._writes < CHECKPOINT_AFTER or (self._checkpoint is not None and self._checkpoint.is_alive()):
            return
        self._writes = 0
        self._checkpoint = threading.Thread(target=_checkpoint, args=(self._path,), daemon=True)
        self._checkpoint.start()


def _checkpoint(path: Path) -> None:
    """Moves the log into the file; it waits for the disk, hence a thread. Writers go on beside it."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    except sqlite3.Error:
        pass  # the next one moves it; nothing is lost in between


class MemoryStore:
    """For tests and for servers that leave nothing behind."""

    def __init__(self) -> None:
        self.rows: dict[str, Kept] = {}

    def load(self) -> list[Kept]:
        return sorted(self.rows.values(), key=lambda kept: (kept.record.created_at, kept.record.id))

    def add(self, record: Record) -> None:
        self.rows[record.id] = Kept(record, None)

    def end(self, end: SandboxEnd) -> None:
        if end.id in self.rows:
            self.rows[end.id] = Kept(self.rows[end.id].record, end)

    def flush(self) -> None:
        pass

    def forget(self, ids: Iterable[str]) -> None:
        for one in ids:
            self.rows.pop(one, None)

    def close(self) -> None:
        pass

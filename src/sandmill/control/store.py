"""What serve remembers of sandboxes: metadata, tokens, idempotency keys, and why they ended.

noded is the truth about what runs; this is the truth about what it was made for. Writes are synchronous and small (one row,
30 µs in a write-ahead log): a create must be on record before noded hears of it. What waits for the disk (the checkpoint)
runs in a thread of its own.
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
    confirmed: bool
    """Whether noded was known to have made it."""
    end: SandboxEnd | None


class Store(Protocol):
    """Durable across a crash of serve. Not thread-safe: the event loop owns it."""

    def load(self) -> list[Kept]:
        """Everything, oldest first."""
        ...

    def add(self, record: Record) -> None: ...

    def confirm(self, ids: Iterable[str]) -> None:
        """These exist at noded."""
        ...

    def end(self, end: SandboxEnd) -> None:
        """Keeps the tombstone in the record's place."""
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
        confirmed INTEGER NOT NULL DEFAULT 0,
        "end" BLOB
    ) WITHOUT ROWID;
    """,
)
"""One entry a version; never changed, only added to."""

_encode = msgspec.json.Encoder().encode
_record = msgspec.json.Decoder(Record)
_end = msgspec.json.Decoder(SandboxEnd)


class SqliteStore:
    """The store in one SQLite file."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it. Raises UsageError when it can't be used."""
        self._path = path
        self._writes = 0
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
        rows = self._db.execute('SELECT record, confirmed, "end" FROM sandboxes ORDER BY created_at, id')
        return [
            Kept(_record.decode(record), bool(confirmed), None if end is None else _end.decode(end))
            for record, confirmed, end in rows
        ]

    def add(self, record: Record) -> None:
        self._db.execute(
            "INSERT INTO sandboxes (id, created_at, record) VALUES (?, ?, ?)",
            (record.id, record.created_at, _encode(record)),
        )
        self._written()

    def confirm(self, ids: Iterable[str]) -> None:
        with self._transaction():
            self._db.executemany("UPDATE sandboxes SET confirmed = 1 WHERE id = ?", [(one,) for one in ids])

    def end(self, end: SandboxEnd) -> None:
        self._db.execute('UPDATE sandboxes SET "end" = ? WHERE id = ?', (_encode(end), end.id))
        self._written()

    def forget(self, ids: Iterable[str]) -> None:
        with self._transaction():
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", [(one,) for one in ids])

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._db.close()

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
        self.rows[record.id] = Kept(record, False, None)

    def confirm(self, ids: Iterable[str]) -> None:
        for one in ids:
            if one in self.rows:
                self.rows[one] = msgspec.structs.replace(self.rows[one], confirmed=True)

    def end(self, end: SandboxEnd) -> None:
        if end.id in self.rows:
            self.rows[end.id] = msgspec.structs.replace(self.rows[end.id], end=end)

    def forget(self, ids: Iterable[str]) -> None:
        for one in ids:
            self.rows.pop(one, None)

    def close(self) -> None:
        pass

"""The SQLite store keeps what it was told across a crash, and is wary of what it doesn't know."""

import sqlite3
from pathlib import Path

import pytest

from sandmill.control import store as module
from sandmill.control.store import MemoryStore, Record, SqliteStore, Store
from sandmill.errors import UsageError
from sandmill.wire import SandboxEnd


def record(number: int) -> Record:
    return Record(
        id=f"i{number:019}", image="host", token="t", created_at=float(number), metadata={"é\n": "\0"}, key=f"k{number}"
    )


@pytest.fixture(params=["sqlite", "memory"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> list[Store]:
    """Two looks at the same store; the second is opened without the first being closed, as after a crash."""
    if request.param == "memory":
        one = MemoryStore()
        return [one, one]
    return [SqliteStore(tmp_path / "s.sqlite"), SqliteStore(tmp_path / "s.sqlite")]


def test_what_was_told_is_there(stores: list[Store]) -> None:
    first, second = stores
    for number in (2, 1, 3, 4):
        first.add(record(number))
    end = SandboxEnd(id=record(2).id, cause="oom", ended_at=5.0)
    first.end(end)
    first.forget([record(4).id])
    other = SandboxEnd(id=record(1).id, cause="killed", ended_at=6.0)
    first.end(other)
    first.flush()
    kept = second.load()
    assert [one.record for one in kept] == [record(1), record(2), record(3)]
    assert [one.end for one in kept] == [other, end, None]
    first.close()
    second.close()


def test_an_end_is_on_record_with_the_next_create(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    store.add(record(1))
    end = SandboxEnd(id=record(1).id, cause="killed", ended_at=6.0)
    store.end(end)
    store.add(record(2))
    after_a_crash = SqliteStore(tmp_path / "s.sqlite")
    assert [one.end for one in after_a_crash.load()] == [end, None]
    after_a_crash.close()
    store.close()


def test_checkpoints_run_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_AFTER", 5)
    store = SqliteStore(tmp_path / "s.sqlite")
    for number in range(20):
        store.add(record(number))
    store.close()
    reopened = SqliteStore(tmp_path / "s.sqlite")
    assert len(reopened.load()) == 20
    reopened.close()


def test_only_we_may_read_it(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s.sqlite").close()
    assert (tmp_path / "s.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UsageError, match="newer"):
        SqliteStore(tmp_path / "s.sqlite")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.sqlite").write_text("this is no database, but text, and enough of it to fill a header" * 4)
    with pytest.raises(UsageError, match="can't be used"):
        SqliteStore(tmp_path / "s.sqlite")

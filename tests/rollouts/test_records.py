"""The log of records: whole lines, one writer, nothing deleted."""

from pathlib import Path

import pytest

from sandmill.errors import ConflictError, UsageError
from sandmill.rollouts import Record, RecordLog, Times

RECORD = Record(
    task="t",
    task_hash="h",
    agent="a",
    grading="fresh",
    attempt=0,
    reward=1.0,
    error=None,
    times=Times(),
    started_at=1.0,
    ended_at=2.0,
)


def test_there_and_back(tmp_path: Path) -> None:
    with RecordLog(tmp_path) as log:
        log.append(RECORD)
        assert log.read() == [RECORD]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    with RecordLog(tmp_path) as log:
        log.append(RECORD)
    with log.path.open("ab") as file:
        file.write(b'{"task": "t", "attem')
    with RecordLog(tmp_path) as log:
        assert log.read() == [RECORD]
        log.append(RECORD)
        assert log.read() == [RECORD, RECORD]


def test_a_broken_line_is_said(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("{}\n")
    with RecordLog(tmp_path) as log, pytest.raises(UsageError, match="line 1"):
        log.read()


def test_one_writer(tmp_path: Path) -> None:
    with RecordLog(tmp_path), pytest.raises(ConflictError, match="another run"):
        RecordLog(tmp_path)


def test_fresh_sets_aside(tmp_path: Path) -> None:
    for _ in range(3):
        with RecordLog(tmp_path, fresh=True) as log:
            assert log.read() == []
            log.append(RECORD)
    assert {path.name for path in tmp_path.iterdir()} == {"records.jsonl", "records.1.jsonl", "records.2.jsonl"}

import subprocess
from pathlib import Path

import pytest

HERE = Path("/app/tally")


@pytest.fixture(scope="module", autouse=True)
def built():
    makefile = (HERE / "Makefile").read_text()
    assert all(flag in makefile for flag in ("-Wall", "-Wextra", "-Werror", "-std=c11"))
    for target in (["clean"], ["clean"], []):
        done = subprocess.run(["make", *target], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def tally(path):
    return subprocess.run([HERE / "tally", str(path)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("data", "lines", "words"),
    [
        (b"", 0, 0),
        (b"one two\nthree\n", 2, 3),
        (b"no newline", 1, 2),
        (b"  lead and   gaps \n", 1, 3),
        (b"tab\tand\nnew\n\nline", 4, 4),
        (b"\n\n\n", 3, 0),
        (b"x", 1, 1),
    ],
)
def test_counts(tmp_path, data, lines, words):
    file = tmp_path / "file"
    file.write_bytes(data)
    done = tally(file)
    assert done.returncode == 0
    assert done.stdout == f"{lines} lines\n{words} words\n{len(data)} bytes\n"


def test_unreadable(tmp_path):
    done = tally(tmp_path / "missing")
    assert done.returncode == 1
    assert done.stderr != ""
    assert done.stdout == ""

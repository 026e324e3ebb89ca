import pytest
from pathspec import GitIgnoreSpec, PathSpec


def spec(*lines):
    return PathSpec.from_lines("gitwildmatch", lines)


@pytest.mark.parametrize("kind", [spec, lambda *lines: GitIgnoreSpec.from_lines(lines)])
def test_true_or_false(kind):
    made = kind("*.py", "!keep.py", "build/")
    assert made.match_file("a.py") is True
    assert made.match_file("keep.py") is False
    assert made.match_file("notes.txt") is False
    assert made.match_file("build/out.txt") is True


def test_no_patterns():
    assert spec().match_file("a") is False


def test_check_file_still_tells_apart():
    made = spec("*.py", "!keep.py")
    assert made.check_file("a.py").include is True
    assert made.check_file("keep.py").include is False
    assert made.check_file("notes.txt").include is None


def test_match_files():
    assert sorted(spec("*.py", "!b.py").match_files(["a.py", "b.py", "c.txt"])) == ["a.py"]
    assert sorted(spec("*.py", "!b.py").match_files(["a.py", "b.py", "c.txt"], negate=True)) == ["b.py", "c.txt"]

"""What COPY finds, and the digest of it."""

import io
import os
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.builds.context import Context, Parcel, archive_items, name_pattern, text_item
from sandmill.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.py", "skip/e.txt", "skip/keep/f.txt", "x.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "link").symlink_to("sub/c.txt")
    return tmp_path


def parcel(context: Context, path: str, base: str) -> Parcel:
    return Parcel(list(context.tree(path, base)))


def test_ignored_files_and_exceptions(root: Path) -> None:
    context = Context(root, "# comment\n*.log\nskip\n!skip/keep\n**/*.py\n")
    assert context.paths() == [
        "a.txt", "b.txt", "link", "skip", "skip/keep", "skip/keep/f.txt", "sub", "sub/c.txt", "sub/deep",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"left out by \.dockerignore"):
        context.find("x.log")
    with pytest.raises(UsageError, match=r"left out by \.dockerignore"):
        context.find("skip/e.txt")
    assert context.find("skip") == ["skip"]


def test_the_ignore_file_beside_the_dockerfile_comes_first(root: Path) -> None:
    (root / ".dockerignore").write_text("*.txt\n")
    (root / "other.Dockerfile.dockerignore").write_text("*.log\n")
    assert "a.txt" in Context.open(root, root / "other.Dockerfile").paths()
    assert "a.txt" not in Context.open(root, root / "Dockerfile").paths()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("[^a].txt", ["b.txt"]),
        ("sub/*/d.py", ["sub/deep/d.py"]),
        ("./a.txt", ["a.txt"]),
        ("/a.txt", ["a.txt"]),
        ("sub/../a.txt", ["a.txt"]),
        (".", ["."]),
        ("/", ["."]),
        ("sub/", ["sub"]),
    ],
)
def test_sources(root: Path, pattern: str, found: list[str]) -> None:
    assert Context(root).find(pattern) == found


@pytest.mark.parametrize("pattern", ["none", "*.none", "../a", "sub/../../a"])
def test_sources_that_are_not_there(root: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match=r"not in the context|outside"):
        Context(root).find(pattern)


def test_links_stay_within_folders_and_are_followed_when_named(root: Path, tmp_path: Path) -> None:
    context = Context(root)
    tree = {item.name: item.info for item in context.tree(".", "app")}
    assert (tree["app/link"].issym(), tree["app/link"].linkname) == (True, "sub/c.txt")
    assert context.file("link", "x").info.isreg()
    (root / "out").symlink_to("/etc")
    with pytest.raises(UsageError, match="leads out of the context"):
        context.place("out/passwd")


def test_the_digest_is_of_content_modes_and_links_not_of_times(root: Path) -> None:
    def digest() -> str:
        return parcel(Context(root), ".", "app").digest()

    first = digest()
    os.utime(root / "a.txt", (1, 1))
    assert digest() == first
    seen = {first}
    (root / "a.txt").write_text("other")
    seen.add(digest())
    (root / "a.txt").chmod(0o755)
    seen.add(digest())
    (root / "link").unlink()
    (root / "link").symlink_to("sub/deep")
    seen.add(digest())
    (root / "a.txt").rename(root / "aa.txt")
    seen.add(digest())
    seen.add(parcel(Context(root), ".", "other").digest())
    assert len(seen) == 6


def test_the_archive_has_owners_of_root_and_the_files_times(root: Path) -> None:
    os.utime(root / "sub/c.txt", (1e9, 1e9))
    with tarfile.open(fileobj=io.BytesIO(parcel(Context(root), "sub", "to").archive())) as made:
        member = made.getmember("to/c.txt")
        assert (member.uid, member.gid, member.mtime) == (0, 0, 10**9)
        file = made.extractfile(member)
        assert file is not None
        assert file.read() == b"sub/c.txt"


def test_archives_are_recognised_by_their_content(tmp_path: Path) -> None:
    for kind in ("", ":gz", ":bz2", ":xz"):
        with tarfile.open(tmp_path / "x", f"w{kind}") as out:  # type: ignore[call-overload]
            info = tarfile.TarInfo("d/f")
            info.uid, info.size = 7, 1
            out.addfile(info, io.BytesIO(b"f"))
        items = archive_items(tmp_path / "x", "at")
        assert items is not None
        assert [(item.name, item.info.uid, item.content) for item in items] == [("at/d/f", 7, b"f")]
    (tmp_path / "y").write_bytes(b"\x1f\x8bno archive")
    assert archive_items(tmp_path / "y", "") is None
    with tarfile.open(tmp_path / "z", "w") as out:
        out.addfile(tarfile.TarInfo("../out"))
    with pytest.raises(UsageError, match="leads out"):
        archive_items(tmp_path / "z", "")


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandmill.builds.context.MOST_BYTES", 3)
    with pytest.raises(UsageError, match=r"\.dockerignore"):
        Parcel([text_item("x", b"four")]).archive()


@pytest.mark.parametrize(
    ("pattern", "fits", "not_these"),
    [
        ("a*b", ["ab", "axxb"], ["a", "abc"]),
        ("[a-c]?", ["ax", "cx"], ["dx", "a"]),
        ("[^a-c]", ["d", "-"], ["a", "b"]),
        ("[\\]x]", ["]", "x"], ["\\"]),
        ("\\*", ["*"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], not_these: list[str]) -> None:
    compiled = name_pattern(pattern)
    assert all(compiled.fullmatch(name) for name in fits)
    assert not any(compiled.fullmatch(name) for name in not_these)


@pytest.mark.parametrize("pattern", ["[a", "[]", "[^]", "[-a]", "[a-]", "a\\", "[b-a]"])
def test_no_patterns(pattern: str) -> None:
    with pytest.raises(UsageError, match="no pattern"):
        Context(Path(__file__).parent).find(f"x/{pattern}")


@given(st.text("ab*?[]^-\\.", max_size=8), st.text("ab.[]\\", max_size=8))
def test_patterns_match_what_is_escaped_and_never_break(pattern: str, name: str) -> None:
    try:
        name_pattern(pattern)
    except (ValueError, re.error):
        pass
    escaped = name_pattern("".join(f"\\{char}" for char in pattern))
    assert escaped.fullmatch(pattern)
    assert bool(escaped.fullmatch(name)) == (name == pattern)

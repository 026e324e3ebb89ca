import gzip
import subprocess

import pytest


def backup(source, target, cwd=None):
    return subprocess.run(["bash", "/app/backup.sh", str(source), str(target)], capture_output=True, text=True, cwd=cwd)


def saved(target):
    return {str(path.relative_to(target)): gzip.decompress(path.read_bytes()) for path in target.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "my source"
    folder.mkdir()
    return folder


def test_awkward_names(source, tmp_path):
    names = ["plain.txt", "two words.txt", "-n.txt", "it's \"so\".txt", "new\nline.txt", "deep/er/a b.txt", ".notes.txt", "s*r.txt"]
    for name in names:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (source / "other.md").write_text("no")
    (source / "link.txt").symlink_to("plain.txt")
    target = tmp_path / "the target"
    done = backup(source, target)
    assert (done.returncode, done.stdout) == (0, f"{len(names)} files saved\n"), done.stderr
    assert saved(target) == {f"{name}.gz": name.encode() for name in names}


def test_none(source, tmp_path):
    done = backup(source, tmp_path / "t")
    assert (done.returncode, done.stdout) == (0, "0 files saved\n")


def test_again(source, tmp_path):
    target = tmp_path / "t"
    (source / "a.txt").write_text("old")
    backup(source, target)
    (source / "a.txt").write_text("new")
    done = backup(source, target)
    assert (done.returncode, done.stdout) == (0, "1 files saved\n")
    assert saved(target) == {"a.txt.gz": b"new"}


def test_relative_paths(source, tmp_path):
    (source / "a.txt").write_text("x")
    done = backup("my source", "t", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1 files saved\n"), done.stderr
    assert saved(tmp_path / "t") == {"a.txt.gz": b"x"}


def test_missing_source(tmp_path):
    done = backup(tmp_path / "missing", tmp_path / "t")
    assert done.returncode == 1
    assert done.stderr != ""
    assert not (tmp_path / "t").exists()

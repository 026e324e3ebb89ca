from unidiff import PatchSet

ADDED = """diff --git a/has spaces/t.sql b/has spaces/t.sql
new file mode 100644
index 0000000..e69de29
"""
DELETED = """diff --git a/old notes.txt b/old notes.txt
deleted file mode 100644
index e69de29..0000000
"""
RENAMED = """diff --git a/a file.txt b/b file.txt
similarity index 100%
rename from a file.txt
rename to b file.txt
"""
PLAIN = """diff --git src/one.py src/one.py
index 1111111..2222222 100644
--- src/one.py
+++ src/one.py
@@ -1,2 +1,2 @@
 first
-second
+zweite
"""


def test_added_empty_file_with_blanks():
    (one,) = PatchSet(ADDED)
    assert one.path == "has spaces/t.sql"
    assert one.is_added_file
    assert (one.source_file, one.target_file) == ("/dev/null", "b/has spaces/t.sql")


def test_deleted_empty_file_with_blanks():
    (one,) = PatchSet(DELETED)
    assert one.path == "old notes.txt"
    assert one.is_removed_file


def test_renamed_file_with_blanks():
    (one,) = PatchSet(RENAMED)
    assert one.is_rename
    assert (one.source_file, one.target_file) == ("a/a file.txt", "b/b file.txt")


def test_several_files_stay_apart():
    patch = PatchSet(ADDED + DELETED + PLAIN)
    assert [one.path for one in patch] == ["has spaces/t.sql", "old notes.txt", "src/one.py"]


def test_without_prefixes():
    (one,) = PatchSet(PLAIN)
    assert one.path == "src/one.py"
    assert (one.added, one.removed) == (1, 1)
    assert one.is_modified_file

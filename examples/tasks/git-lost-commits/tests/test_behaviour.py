import subprocess
from pathlib import Path

NOTES = Path("/app/notes")


def git(*words):
    done = subprocess.run(
        ["git", "-c", f"safe.directory={NOTES}", "-C", str(NOTES), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_history():
    assert git("log", "--reverse", "--format=%s | %an", "main").splitlines() == [
        "Begin the notes | Nora Note",
        "Add the recipe for soup | Nora Note",
        "Add the recipe for bread | Bert Baker",
        "Correct the amount of salt | Sally Salt",
        "Add a shopping list | Nora Note",
    ]


def test_each_commit_changes_its_own_file():
    changed = [git("show", "--format=", "--name-only", f"main~{back}") for back in (4, 3, 2, 1, 0)]
    assert changed == ["README.md", "soup.md", "bread.md", "bread.md", "shopping.txt"]


def test_content():
    assert (NOTES / "bread.md").read_text() == "Bread\n\n500 g flour\n350 g water\n10 g salt\n"
    assert (NOTES / "shopping.txt").read_text() == "carrots\nflour\n"
    assert (NOTES / "soup.md").read_text() == "Soup\n\nWater, carrots, salt.\n"


def test_clean_and_on_main():
    assert git("status", "--porcelain") == ""
    assert git("rev-parse", "--abbrev-ref", "HEAD") == "main"

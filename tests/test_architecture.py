"""Arrows point one way: a package imports only what stands before it (ARCHITECTURE.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "sandmill"

# Each layer may import its own and those before it. `errors` and `wire` are the ground; `cli` and `bench` the roof.
LAYERS: list[set[str]] = [
    {"errors"},
    {"wire"},
    {"backends", "sdk"},
    {"control"},
    {"resources"},
    {"tasks"},
    {"rollouts"},
    {"gateway", "training", "worlds", "placement", "desktop"},
    {"bench", "clients"},
    {"cli", "ui"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path.parent != SRC or path.stem in LEVEL)


def package_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level parts of sandmill that a module imports, wherever in it the import stands."""
    found: set[str] = set()
    here = ("sandmill", *path.relative_to(SRC).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sandmill.")}
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            full = (*base, *(node.module or "").split(".")) if node.module else base
            if full[:1] != ("sandmill",):
                continue
            found |= {full[1]} if len(full) > 1 else {alias.name for alias in node.names if alias.name in LEVEL}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_arrows_point_one_way(path: Path) -> None:
    package = package_of(path)
    assert package in LEVEL, f"{package} has no layer: add it to LAYERS and to ARCHITECTURE.md"
    # A command line may start anything below it lazily; the ground may import nothing above.
    upward = {name for name in imports(path) if name in LEVEL and LEVEL[name] > LEVEL[package]}
    assert not upward, f"{path.relative_to(SRC)} imports {upward}, which stand after {package}"


def test_importing_sandmill_is_quiet_and_light() -> None:
    code = (
        "import sys, threading; import sandmill;"
        "heavy = {'rich', 'click', 'starlette', 'uvicorn', 'sqlite3', 'httpx', 'asyncio'} & set(sys.modules);"
        "print(sorted(heavy), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"
    assert done.stderr == ""

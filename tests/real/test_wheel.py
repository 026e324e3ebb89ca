"""`pip wheel .` gives a wheel that holds both daemons and works in a clean environment without cargo."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_works_without_cargo(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (wheel,) = (tmp_path / "dist").glob("sandmill-*.whl")
    assert "none-any" not in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {"sandmill/_bin/noded", "sandmill/_bin/sandboxd"} <= set(names)

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)], check=True)
    bare = {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
    }
    assert shutil.which("cargo", path=bare["PATH"]) is None
    code = "from sandmill import Sandbox\nwith Sandbox() as box: print(box.run('echo from the wheel').stdout.decode(), end='')"
    done = subprocess.run(
        [python, "-c", code], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "from the wheel\n"), done.stderr

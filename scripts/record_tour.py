#!/usr/bin/env python3
"""Records the README's tour: runs its lines for real and draws what they printed as docs/tour/tour.svg.

Usage: .venv/bin/python scripts/record_tour.py
"""

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "docs" / "tour" / "tour.sh").read_text().splitlines()
WIDTH = 100


def run(line: str, environment: dict[str, str]) -> str:
    """What a line prints on a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", line], stdin=child, stdout=child, stderr=child, env=environment, close_fds=True
    )
    os.close(child)
    output = bytearray()
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    process.wait()
    os.close(parent)
    return output.decode(errors="replace").replace("\r\n", "\n").rstrip("\n")


def main() -> int:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory(prefix="sandmill-tour-") as folder:
        server = subprocess.Popen(
            [
                ROOT / ".venv/bin/sandmill",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--data-listen",
                "127.0.0.1:0",
                "--state-dir",
                folder,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        found = re.search(r"ready api=(\S+)", server.stdout.readline())
        if not found:
            return 1
        environment = os.environ | {
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "SANDMILL_API_URL": found[1],
            "SANDMILL_API_KEY": (Path(folder) / "api-key").read_text().strip(),
            "COLUMNS": str(WIDTH),
            "TERM": "xterm-256color",
        }
        try:
            for line in filter(None, LINES):
                console.print(Text("$ ", style="bold green") + Text(line, style="bold"))
                start = time.perf_counter()
                console.print(Text.from_ansi(run(line, environment)))
                print(f"{time.perf_counter() - start:6.2f} s  {line}", file=sys.stderr)
        finally:
            server.terminate()
            server.wait(30)
    console.save_svg(str(ROOT / "docs" / "tour" / "tour.svg"), title="sandmill")
    return 0


if __name__ == "__main__":
    sys.exit(main())

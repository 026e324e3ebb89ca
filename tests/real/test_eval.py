"""The main job on real sandboxes: the example tasks, solved and unsolved, and Ctrl-C in the middle."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Server

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "sandmill.cli", "eval", str(EXAMPLES), "--out", str(out), *words]


@pytest.mark.parametrize("way", [(), ("--grade-in-place",)], ids=["fresh", "in-place"])
def test_oracle_solves_and_nop_does_not(server: Server, tmp_path: Path, way: tuple[str, ...]) -> None:
    done = subprocess.run(
        command(tmp_path, "--agent", "oracle", "--agent", "nop", "--concurrency", "4", "--json", *way),
        env=server.environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rewards = {row["agent"]: row["reward_mean"] for row in json.loads(done.stdout)["totals"]}
    assert rewards == {"oracle": 1.0, "nop": 0.0}


def test_interrupt_releases_everything_and_resumes(server: Server, tmp_path: Path) -> None:
    words = command(tmp_path, "--agent", "command:sleep 3", "--filter", "git-*", "-k", "4", "--concurrency", "2")
    process = subprocess.Popen(
        words, env=server.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    records = tmp_path / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline, "no attempt was finished"
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "To go on: sandmill eval" in said
    left = subprocess.run(
        [sys.executable, "-m", "sandmill.cli", "ls", "--json"],
        env=server.environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert "sandmill.task" not in left.stdout
    again = subprocess.run(words, env=server.environment, capture_output=True, check=False, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming:" in again.stdout
    assert records.read_text().count("\n") == 4

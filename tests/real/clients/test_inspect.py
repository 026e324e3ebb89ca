"""Inspect (`inspect-ai`), unmodified, with Sandmill as its sandbox: self-check, evals with a scripted model, command line."""

import json
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from sandmill import Sandbox

from ..conftest import Server, claimed
from .environments import ROOT, client_python

HERE = Path(__file__).parent
SELF_CHECKS = 44
"""How many the pinned release has."""
FINISH_S = 300


@pytest.fixture(scope="module")
def python() -> str:
    return str(client_python("inspect"))


def checks(python: str, server: Server, file: str, report: Path, **environment: str) -> Counter[str]:
    """Runs a file of checks with Inspect's interpreter; the outcomes, counted. Fails with what failed."""
    options = ["--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    options += ["-o", "asyncio_default_fixture_loop_scope=function", "--junitxml", str(report), "--tb=short", "-q"]
    done = subprocess.run(
        [python, "-m", "pytest", "-c", os.devnull, *options, str(HERE / file)],
        cwd=ROOT,
        env=server.environment | environment,
        capture_output=True,
        text=True,
        timeout=FINISH_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    outcomes: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        outcomes["passed" if skipped is None else str(skipped.get("type"))] += 1
    return outcomes


@pytest.mark.parametrize(("user", "cannot"), [("user", 0), ("", 3)], ids=["user", "root"])
def test_self_check(python: str, server: Server, tmp_path: Path, user: str, cannot: int) -> None:
    outcomes = checks(python, server, "inspect_checks.py", tmp_path / "report.xml", SANDMILL_CHECK_USER=user)
    assert outcomes == Counter({"passed": SELF_CHECKS - cannot, "pytest.xfail": cannot})
    assert not claimed(server.state_dir)


def test_provider(python: str, server: Server, tmp_path: Path) -> None:
    assert set(checks(python, server, "inspect_provider.py", tmp_path / "report.xml")) == {"passed"}
    assert not claimed(server.state_dir)


def evaluated(python: str, environment: dict[str, str], logs: Path, *how: str) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [python, str(HERE / "inspect_evals.py"), str(logs), *how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=FINISH_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return {name: told["samples"] for name, told in said.items()}


def scored(scorer: str, value: str, retries: int = 0) -> dict[str, object]:
    return {"scores": {scorer: value}, "error": None, "retries": retries}


TASKS = {
    "flag": {
        "find the flag, patiently": scored("includes", "C"),
        "find the flag, in haste": scored("includes", "I"),
    },
    "function": {
        "write below_zero, well": scored("passes_its_tests", "C"),
        "write below_zero, badly": scored("passes_its_tests", "I"),
    },
}


def test_tasks_are_scored_and_nothing_is_left(python: str, server: Server, tmp_path: Path) -> None:
    assert evaluated(python, server.environment, tmp_path) == TASKS
    assert not claimed(server.state_dir)


def test_tasks_with_an_embedded_server(python: str, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    alone = {k: v for k, v in server.environment.items() if not k.startswith("SANDMILL_API")} | {"TMPDIR": str(folder)}
    assert evaluated(python, alone, tmp_path / "logs") == TASKS
    assert not list(folder.glob("sandmill-*"))


def test_a_lost_sandbox_is_an_error_and_never_a_score(python: str, server: Server, tmp_path: Path) -> None:
    samples = evaluated(python, server.environment, tmp_path, "lose")["losing"]
    assert samples["keep the sandbox"] == scored("includes", "C")
    lost = samples["lose the sandbox"]
    assert isinstance(lost, dict)
    assert lost["scores"] == {}
    assert "has ended (killed" in lost["error"]
    assert not claimed(server.state_dir)


def test_a_lost_sandbox_is_retried_by_inspect(python: str, server: Server, tmp_path: Path) -> None:
    samples = evaluated(python, server.environment, tmp_path, "lose-once")["losing"]
    assert samples["lose the sandbox"] == scored("includes", "C", retries=1)
    assert not claimed(server.state_dir)


def test_an_interrupted_eval_leaves_nothing(python: str, server: Server, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [python, str(HERE / "inspect_evals.py"), str(tmp_path), "hang"],
        env=server.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        give_up = time.monotonic() + 60
        while not running(server, "sleep 1000"):
            assert time.monotonic() < give_up
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not claimed(server.state_dir)


def running(server: Server, command: str) -> bool:
    """Whether a sandbox of the server runs a command."""
    for view in Sandbox.list(api_url=server.api_url, api_key=server.api_key):
        with Sandbox.connect(view.id, api_url=server.api_url, api_key=server.api_key) as box:
            if command in box.run(["ps", "-eo", "args"]).text.splitlines():
                return True
    return False


def inspect(python: str, environment: dict[str, str], *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [python, "-m", "inspect_ai", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=FINISH_S,
        check=False,
    )


TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

@scorer(metrics=[accuracy()])
def user():
    async def score(state, target):
        return Score(value="C" if (await sandbox().exec(["id", "-un"])).stdout == "user\\n" else "I")
    return score

@solver
def nothing():
    async def solve(state, generate):
        return state
    return solve

@task
def who():
    return Task(dataset=[Sample("")], solver=nothing(), scorer=user())
"""


def test_the_command_line_finds_the_provider_and_its_file(python: str, server: Server, tmp_path: Path) -> None:
    """Nothing imports the provider here: the entry point registers it, and sandmill.yaml is found beside the task."""
    (tmp_path / "who.py").write_text(TASK)
    (tmp_path / "sandmill.yaml").write_text("user: user\n")
    words = ["eval", "who.py", "--model", "mockllm/model", "--sandbox", "sandmill", "--display", "plain"]
    outcome = inspect(python, server.environment, *words, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert re.search(r"accuracy\W+1\.000", outcome.stdout), outcome.stdout
    with Sandbox(api_url=server.api_url, api_key=server.api_key, metadata={"client": "inspect"}) as box:
        outcome = inspect(python, server.environment, "sandbox", "cleanup", "sandmill", cwd=tmp_path)
        assert outcome.stdout == f"sandmill: ended {box.id}\n", outcome.stderr
    (tmp_path / "sandmill.yaml").write_text("memory: 5\n")
    outcome = inspect(python, server.environment, *words, cwd=tmp_path)
    assert outcome.returncode != 0
    assert "memory: Extra inputs are not permitted" in outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert not claimed(server.state_dir)

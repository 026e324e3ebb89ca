"""Harbor, unmodified, over this repository's tasks: its own agents, its own verifier, its own result files."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandmill import Sandbox

from ..conftest import Server
from .environments import ROOT, client_python

TASKS = ROOT / "examples" / "tasks"
CHOSEN = ("c-build-repair", "git-lost-commits", "pathspec-falsy")


def harbor_run(server: Server, tasks: Path, jobs: Path, *words: str) -> list[dict[str, Any]]:
    """Runs one job to its end; gives the results of its trials."""
    harbor = client_python("harbor").parent / "harbor"
    command = [harbor, "run", "--env", "sandmill.clients.harbor:SandmillEnvironment", "--path", tasks]
    done = subprocess.run(
        [*command, "--jobs-dir", jobs, "--job-name", "job", "--n-concurrent", "2", "--quiet", "--yes", *words],
        env=server.environment | {"HARBOR_TELEMETRY": "off", "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted((jobs / "job").glob("*/result.json"))]


def sandboxes(server: Server) -> str:
    """What is left of Harbor's on the server, as JSON."""
    command = [client_python("harbor").parent / "sandmill", "ls", "--json"]
    done = subprocess.run(command, env=server.environment, capture_output=True, check=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_rewards_are_those_of_the_agent(server: Server, tmp_path: Path, agent: str, reward: float) -> None:
    names = [word for name in CHOSEN for word in ("--include-task-name", f"*{name}")]
    trials = harbor_run(server, TASKS, tmp_path, "--agent", agent, *names)
    assert [trial["exception_info"] for trial in trials] == [None] * len(CHOSEN)
    rewards = {trial["task_name"].rsplit("/")[-1]: trial["verifier_result"]["rewards"] for trial in trials}
    assert rewards == {name: {"reward": reward} for name in CHOSEN}
    assert "harbor.session" not in sandboxes(server)


def test_an_environment_that_cannot_be_made_is_an_error_and_no_reward(server: Server, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "broken"
    shutil.copytree(TASKS / "c-build-repair", task)
    (task / "environment" / "prepare.toml").write_text("[[steps]]\nrun = 'echo no luck; exit 7'\n")
    (trial,) = harbor_run(server, tmp_path / "tasks", tmp_path / "jobs", "--agent", "oracle")
    assert trial["verifier_result"] is None
    assert trial["exception_info"]["exception_type"] == "PreparationError"


def test_every_method_of_the_environment(server: Server, tmp_path: Path) -> None:
    words = ("--agent", "harbor_probe:ProbeAgent", "--no-delete")
    (trial,) = harbor_run(server, TASKS / "c-build-repair", tmp_path, *words)
    assert trial["exception_info"] is None, trial["exception_info"]
    assert trial["verifier_result"]["rewards"] == {"reward": 0.0}
    (log,) = (tmp_path / "job").glob("*/trial.log")
    kept = re.search(r"sandmill run --image (\S+) --", log.read_text())
    assert kept, log.read_text()
    with Sandbox(kept[1], api_url=server.api_url, api_key=server.api_key) as box:
        assert box.files.exists("/new/place/tool")


def test_an_agent_that_ran_into_its_timeout_is_graded_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "slow"
    shutil.copytree(TASKS / "c-build-repair", task)
    (task / "solution" / "solve.sh").write_text("#!/bin/sh\nsetsid sleep 99 & sleep 99\n")
    (trial,) = harbor_run(
        server, tmp_path / "tasks", tmp_path / "jobs", "--agent", "oracle", "--agent-timeout-multiplier", "0.005"
    )
    assert trial["exception_info"]["exception_type"] in ("AgentTimeoutError", "CommandTimeoutError")
    assert trial["verifier_result"]["rewards"] == {"reward": 0.0}
    assert "harbor.session" not in sandboxes(server)


@pytest.mark.parametrize(("agent", "error"), [("CutOffAgent", "TransportError"), ("GoneAgent", "SandboxGoneError")])
def test_a_failure_of_the_infrastructure_is_never_a_reward(
    server: Server, tmp_path: Path, agent: str, error: str
) -> None:
    (trial,) = harbor_run(server, TASKS / "c-build-repair", tmp_path, "--agent", f"harbor_probe:{agent}")
    assert trial["exception_info"]["exception_type"] == error
    assert trial["verifier_result"] is None
    assert "harbor.session" not in sandboxes(server)


def test_mounts_are_refused(server: Server, tmp_path: Path) -> None:
    mounts = json.dumps([{"type": "bind", "source": str(tmp_path), "target": "/mnt"}])
    (trial,) = harbor_run(server, TASKS / "c-build-repair", tmp_path, "--agent", "nop", "--mounts", mounts)
    assert trial["exception_info"]["exception_type"] == "UsageError"
    assert "mounts" in trial["exception_info"]["exception_message"]

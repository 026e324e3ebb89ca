"""Agents: what attempts a task. A new one is a new class with a name and `run`, and a line in `agent_of`."""

import hashlib
import re
from typing import Protocol

from sandmill.errors import UsageError
from sandmill.rollouts.workshop import Box
from sandmill.tasks import Task
from sandmill.wire import Result

INSTRUCTION_FILE = "/instruction.md"
ENV_LIMIT_BYTES = 100_000
"""Linux takes at most 128 KiB for one variable; a longer instruction is in the file alone."""


class Agent(Protocol):
    """Works in a sandbox that belongs to one attempt alone."""

    @property
    def name(self) -> str:
        """Its identity in records: equal names mean equal behaviour, so a second run skips what the first finished."""
        ...

    async def run(self, box: Box, task: Task) -> Result | None:
        """Attempts the task within its own time limit (`task.config.agent_timeout_s`).

        What it achieved is in the sandbox; the result says how it ended (None: it ran nothing). A failure and a timeout are
        results: the attempt is graded as it stands. Errors of the sandbox are raised.
        """
        ...


class OracleAgent:
    """Runs the task's own solution; the proof that a task can be solved."""

    name = "oracle"

    async def run(self, box: Box, task: Task) -> Result | None:
        script = task.solution / "solve.sh"
        if not script.is_file():
            raise UsageError(
                f"{task.name} has no solution/solve.sh", hint="the oracle needs one", code="solution_missing"
            )
        await box.upload(task.solution, "/solution")
        await box.run(["chmod", "+x", "/solution/solve.sh"], user="root")
        env = {"DEBIAN_FRONTEND": "noninteractive", **task.config.solution_env}
        return await box.run(
            ["/solution/solve.sh"], env=env, user=task.config.agent_user, timeout_s=task.config.agent_timeout_s
        )


class NopAgent:
    """Does nothing; the proof that a task isn't solved already."""

    name = "nop"

    async def run(self, box: Box, task: Task) -> Result | None:
        return None


class CommandAgent:
    """Runs a shell line in the sandbox.

    The instruction is in the file that SANDMILL_INSTRUCTION_FILE names, and (up to 100,000 bytes) in SANDMILL_INSTRUCTION;
    SANDMILL_TASK is the task's name.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        words = re.sub(r"[^A-Za-z0-9]+", "-", line).strip("-")[:24]
        self.name = f"command-{words}-{hashlib.sha256(line.encode()).hexdigest()[:8]}"

    async def run(self, box: Box, task: Task) -> Result | None:
        text = task.instruction.encode()
        await box.write(INSTRUCTION_FILE, text)
        env = {"SANDMILL_INSTRUCTION_FILE": INSTRUCTION_FILE, "SANDMILL_TASK": task.name}
        if len(text) <= ENV_LIMIT_BYTES and b"\0" not in text:
            env["SANDMILL_INSTRUCTION"] = task.instruction
        return await box.run(self.line, env=env, user=task.config.agent_user, timeout_s=task.config.agent_timeout_s)


def agent_of(text: str) -> Agent:
    """`oracle`, `nop` or `command:SHELL LINE`. Raises UsageError for anything else."""
    if text == "oracle":
        return OracleAgent()
    if text == "nop":
        return NopAgent()
    kind, colon, line = text.partition(":")
    if kind == "command" and colon and line.strip():
        return CommandAgent(line.strip())
    raise UsageError(f"no agent {text!r}", hint="there are oracle, nop and 'command:SHELL LINE'")

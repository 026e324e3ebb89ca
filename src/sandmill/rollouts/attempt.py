"""One try of one attempt: its sandbox, the agent, the grading, and nothing left behind."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sandmill.errors import NotFoundError, SandmillError
from sandmill.rollouts import grading
from sandmill.rollouts.records import Ending, Spent
from sandmill.rollouts.schedule import Job
from sandmill.rollouts.workshop import Box, BoxSpec, Workshop
from sandmill.tasks import Task
from sandmill.wire import Result

T = TypeVar("T")

CLEAN_S = 60.0
"""How long the end of a sandbox is waited for; after that its lease ends it."""
AGENT_LOGS = "/logs/agent"


@dataclass
class Outcome:
    """What is known of an attempt so far; times in seconds."""

    prepare_s: float = 0.0
    run_s: float = 0.0
    grade_s: float = 0.0
    clean_s: float = 0.0
    sandbox: str | None = None
    agent_end: Ending | None = None
    verifier_end: Ending | None = None
    spent: Spent | None = None
    grade: grading.Grade | None = None
    notes: list[str] = field(default_factory=list)
    """Cleanups that failed: reported beside the outcome, never instead of it."""


class Attempt:
    """One try. `run`, then `grade`; each leaves nothing behind if it fails or is cancelled."""

    def __init__(self, job: Job, workshop: Workshop, folder: Path, *, in_place: bool, now: Callable[[], float]) -> None:
        self.job = job
        self.outcome = Outcome()
        self._workshop = workshop
        self._folder = folder
        self._in_place = in_place
        self._now = now
        self._image: str | None = None
        self._box: Box | None = None

    async def run(self, image: str) -> None:
        """Makes the sandbox and lets the agent work in it."""
        task, outcome = self.job.task, self.outcome
        await asyncio.to_thread(_empty, self._folder)
        start = self._now()
        self._box = box = await self._workshop.create(_spec(task, image, task.config.agent_network, self.job))
        outcome.sandbox = box.id
        try:
            await box.run(f"mkdir -p {AGENT_LOGS} {grading.VERIFIER_LOGS} && chmod -R 777 /logs", user="root")
            begun = self._now()
            outcome.prepare_s += begun - start
            result = await self.job.agent.run(box, task)
            outcome.run_s += self._now() - begun
            if result is not None:
                outcome.agent_end = ending_of(result)
                await asyncio.to_thread(_write_output, self._folder / "agent.txt", result)
            usage = await box.usage()
            outcome.spent = Spent(
                cpu_s=usage.cpu_s,
                memory_peak_bytes=usage.memory_peak_bytes,
                io_read_bytes=usage.io_read_bytes,
                io_write_bytes=usage.io_write_bytes,
                disk_bytes=usage.disk_bytes,
            )
            await self._fetch(box, AGENT_LOGS, "agent")
            start = self._now()
            if self._in_place:
                await end_processes(box)
            else:
                # Ends the sandbox and with it whatever the agent left running.
                await to_its_end(self._commit(box))
            outcome.clean_s += self._now() - start
        except BaseException:
            await self.release()
            raise

    async def grade(self) -> None:
        """Grades what `run` left: in a fresh sandbox from its changes, or in the same one."""
        task, outcome = self.job.task, self.outcome
        start = self._now()
        try:
            if self._box is None:
                assert self._image is not None
                spec = _spec(task, self._image, task.config.verifier_network, self.job)
                self._box = await self._workshop.create(spec)
            box = self._box
            result = await grading.verify(box, task)
            outcome.verifier_end = ending_of(result)
            await asyncio.to_thread(_write_output, self._folder / "verifier.txt", result)
            await self._fetch(box, grading.VERIFIER_LOGS, "verifier")
            grading.check_ending(result)
            outcome.grade = await grading.read_grade(box)
        finally:
            outcome.grade_s += self._now() - start
            await self.release()

    async def release(self) -> None:
        """Ends the sandbox and removes the changes that were kept; to its end even when cancelled."""
        start = self._now()
        box, image = self._box, self._image
        self._box = self._image = None
        await to_its_end(self._release(box, image))
        self.outcome.clean_s += self._now() - start

    async def _commit(self, box: Box) -> None:
        self._image = await box.commit()
        self._box = None

    async def _release(self, box: Box | None, image: str | None) -> None:
        try:
            async with asyncio.timeout(CLEAN_S):
                if box is not None:
                    await box.kill()
                if image is not None:
                    await self._workshop.discard(image)
        except (SandmillError, TimeoutError) as error:
            self.outcome.notes.append(f"{self.job.label}: clean-up: {str(error) or 'took too long'}")

    async def _fetch(self, box: Box, path: str, name: str) -> None:
        """Logs are worth having, but no attempt fails for want of them."""
        try:
            await box.download(path, self._folder / name)
        except NotFoundError:
            pass
        except SandmillError as error:
            if error.code == "sandbox_gone":
                raise
            self.outcome.notes.append(f"{self.job.label}: {path} could not be fetched: {error}")


def _spec(task: Task, image: str, network: str, job: Job) -> BoxSpec:
    return BoxSpec(
        image=image,
        network=network,
        cpu=task.config.cpus,
        memory_mb=task.config.memory_mb,
        disk_mb=task.config.storage_mb,
        env=task.config.env,
        workdir=task.workdir,
        user=task.environment.user,
        metadata={"sandmill.task": task.name, "sandmill.agent": job.agent.name, "sandmill.attempt": str(job.attempt)},
    )


async def end_processes(box: Box) -> None:
    """Ends every process in a sandbox but its init. Twice, for what was forking meanwhile."""
    for _ in range(2):
        await box.run("kill -9 -1 2>/dev/null; true", user="root")


def ending_of(result: Result) -> Ending:
    return Ending(
        exit_code=result.exit_code,
        signal=result.signal,
        reason=result.reason,
        duration_s=result.duration_s,
        usage=result.usage,
    )


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()


def _empty(folder: Path) -> None:
    """Logs of an earlier try make place for those of this one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _write_output(file: Path, result: Result) -> None:
    parts = [result.stdout]
    if result.stderr:
        parts += [b"\n--- stderr ---\n", result.stderr]
    code = "none" if result.exit_code is None else result.exit_code
    parts.append(f"\n--- {result.reason}, exit code {code}, {result.duration_s:.2f} s ---\n".encode())
    file.write_bytes(b"".join(parts))

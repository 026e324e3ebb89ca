"""Evaluating agents on tasks: acts on what the schedule decides, and writes a record for every attempt."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sandmill.errors import PreparationError
from sandmill.rollouts.agents import Agent
from sandmill.rollouts.attempt import Attempt, Outcome
from sandmill.rollouts.failures import FINAL, Verdict, classify
from sandmill.rollouts.records import Key, Record, RecordLog, Times
from sandmill.rollouts.schedule import Action, Counts, Fail, Grade, Job, Limits, Prepare, Rest, Run, Schedule
from sandmill.rollouts.workshop import Workshop
from sandmill.tasks import Task

__all__ = ["Clock", "Evaluation", "Limits", "Watcher"]


@dataclass(frozen=True)
class Clock:
    """Time, as an evaluation sees it; tests give their own."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Watcher(Protocol):
    """Sees an evaluation go on."""

    def finished(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class _Wait:
    """When an attempt came to wait, and how much of the waiting was for its environment."""

    since: float
    queue_s: float = 0.0
    prepare_s: float = 0.0
    started_at: float = 0.0


class Evaluation:
    """`run` attempts every task with every agent `k` times, but for what `log` says is finished.

    Records of finished attempts that belong to this evaluation are in `records` from the start; `resumed` counts them. An
    attempt is finished when it has a reward, or an error that would only repeat itself (failures.py).
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        agents: Sequence[Agent],
        k: int,
        workshop: Workshop,
        log: RecordLog,
        folder: Path,
        *,
        in_place: bool = False,
        limits: Limits | None = None,
        clock: Clock | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._workshop = workshop
        self._log = log
        self._folder = folder
        self._in_place = in_place
        self._clock = clock or Clock()
        self._watcher = watcher
        self._grading = "in-place" if in_place else "fresh"
        # Breadth first: every task once before any task twice.
        jobs = [Job(task, agent, number) for number in range(k) for agent in agents for task in tasks]
        finished = {record.key: record for record in log.read() if record.error is None or record.error.type in FINAL}
        self.records: list[Record] = [finished[key] for job in jobs if (key := self._key(job)) in finished]
        self.resumed = len(self.records)
        self._schedule = Schedule([job for job in jobs if self._key(job) not in finished], limits or Limits())
        self._attempts: dict[Job, Attempt] = {}
        self._waits: dict[Job, _Wait] = {}
        self._images: dict[str, str] = {}
        self._prepare_spans: dict[str, tuple[float, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = self._clock.now()

    def statistics(self) -> Counts:
        """Where the attempts of this run are."""
        return self._schedule.statistics()

    async def run(self) -> list[Record]:
        """Runs everything; the records of all attempts, resumed ones first.

        Cancelled: what runs is ended, its sandboxes with it, and CancelledError raised. Attempts under way leave no record.
        """
        self._begun = self._clock.now()
        try:
            while True:
                for action in self._schedule.decide():
                    self._act(action)
                if self._schedule.finished and not self._tasks:
                    return self.records
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                for task in done:
                    task.result()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Attempts between their stages have no task that would release them.
        await asyncio.gather(*(attempt.release() for attempt in self._attempts.values()))
        self._tasks.clear()
        self._attempts.clear()

    def _act(self, action: Action) -> None:
        match action:
            case Prepare():
                self._spawn(self._prepare(action))
            case Run():
                self._spawn(self._run(action.job))
            case Grade():
                self._spawn(self._grade(action.job))
            case Rest():
                self._spawn(self._rest(action))
            case Fail():
                self._finish(action.job, action.verdict)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _wait_of(self, job: Job) -> _Wait:
        if job not in self._waits:
            self._waits[job] = _Wait(self._begun)
        return self._waits[job]

    async def _prepare(self, action: Prepare) -> None:
        task = action.task
        begun = self._clock.now()
        try:
            if action.delay_s:
                await self._clock.sleep(action.delay_s)
            async with asyncio.timeout(task.config.build_timeout_s):
                self._images[task.content_hash] = await self._workshop.prepare(task.environment)
        except TimeoutError:
            self._schedule.prepare_failed(task, classify(_too_slow(task)))
        except Exception as error:  # the one place where errors of a preparation become data
            self._schedule.prepare_failed(task, classify(error))
        else:
            self._schedule.prepared(task)
        finally:
            self._prepare_spans[task.content_hash] = (begun, self._clock.now())

    async def _run(self, job: Job) -> None:
        now = self._clock.now()
        wait = self._wait_of(job)
        begun, ended = self._prepare_spans.get(job.task.content_hash, (now, now))
        preparing = max(0.0, min(ended, now) - max(begun, wait.since))
        wait.prepare_s += preparing
        wait.queue_s += now - wait.since - preparing
        wait.started_at = wait.started_at or self._clock.wall()
        folder = self._folder / job.task.name / f"{job.agent.name}.{job.attempt}"
        attempt = Attempt(job, self._workshop, folder, in_place=self._in_place, now=self._clock.now)
        self._attempts[job] = attempt
        try:
            await attempt.run(self._images[job.task.content_hash])
        except Exception as error:  # the one place where errors of an attempt become data
            self._failed(job, error, grading=False)
        else:
            self._schedule.ran(job)

    async def _grade(self, job: Job) -> None:
        try:
            await self._attempts[job].grade()
        except Exception as error:  # as above
            self._failed(job, error, grading=True)
        else:
            self._schedule.graded(job)
            self._finish(job, None)

    def _failed(self, job: Job, error: Exception, *, grading: bool) -> None:
        verdict = classify(error)
        self._schedule.failed(job, verdict, grading=grading)
        if verdict.try_again:
            self._note(f"{job.label}: {verdict.failure.message.splitlines()[0]}")

    async def _rest(self, action: Rest) -> None:
        self._wait_of(action.job).since = self._clock.now()
        await self._clock.sleep(action.delay_s)
        self._schedule.rested(action.job)

    def _finish(self, job: Job, verdict: Verdict | None) -> None:
        attempt = self._attempts.pop(job, None)
        outcome = attempt.outcome if attempt else Outcome()
        wait = self._wait_of(job)
        now = self._clock.wall()
        key = self._key(job)
        record = Record(
            task=key.task,
            task_hash=key.task_hash,
            agent=key.agent,
            grading=key.grading,
            attempt=key.attempt,
            reward=outcome.grade.reward if outcome.grade and verdict is None else None,
            rewards=outcome.grade.rewards if outcome.grade and verdict is None else {},
            error=verdict.failure if verdict else None,
            times=Times(
                queue_s=round(wait.queue_s, 6),
                prepare_s=round(wait.prepare_s + outcome.prepare_s, 6),
                run_s=round(outcome.run_s, 6),
                grade_s=round(outcome.grade_s, 6),
                clean_s=round(outcome.clean_s, 6),
            ),
            started_at=wait.started_at or now,
            ended_at=now,
            tries=max(1, job.tries),
            sandbox=outcome.sandbox,
            agent_end=outcome.agent_end,
            agent_timed_out=outcome.agent_end is not None and outcome.agent_end.reason == "timeout",
            verifier_end=outcome.verifier_end,
            usage=outcome.spent,
        )
        self._log.append(record)
        self.records.append(record)
        for note in outcome.notes:
            self._note(note)
        if self._watcher is not None:
            self._watcher.finished(record)

    def _note(self, text: str) -> None:
        if self._watcher is not None:
            self._watcher.note(text)

    def _key(self, job: Job) -> Key:
        return Key(job.task.name, job.task.content_hash, job.agent.name, self._grading, job.attempt)


def _too_slow(task: Task) -> PreparationError:
    limit = task.config.build_timeout_s
    hint = "raise environment.build_timeout_sec in task.toml"
    return PreparationError(
        f"preparing {task.name} took longer than {limit:.0f} s", hint=hint, code="preparation_timeout"
    )

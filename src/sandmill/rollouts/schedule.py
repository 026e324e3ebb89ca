"""What to do next: a pure, synchronous decision over the state of all attempts. The evaluation acts on it.

An environment is prepared when the first attempt needs it, once. An attempt holds one of `in_flight` places from the making
of its sandbox to the end of its grading, so that nothing piles up between the stages; grading goes first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandmill.rollouts.agents import Agent
from sandmill.rollouts.failures import Verdict
from sandmill.tasks import Task


@dataclass(frozen=True)
class Limits:
    """How much at once, and how often an attempt is tried again after its infrastructure failed."""

    in_flight: int = 4
    preparing: int = 2
    grading: int = 4
    tries: int = 3
    backoff_s: float = 1.0
    """Before the second try; doubled for each further one."""


@dataclass(eq=False)
class Job:
    """One attempt on its way. `waited_s` adds up over its tries."""

    task: Task
    agent: Agent
    attempt: int
    tries: int = 0
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.label = f"{self.task.name} {self.agent.name} #{self.attempt}"


@dataclass(frozen=True)
class Prepare:
    """Prepare the environment of a task."""

    task: Task
    delay_s: float = 0.0


@dataclass(frozen=True)
class Run:
    job: Job


@dataclass(frozen=True)
class Grade:
    job: Job


@dataclass(frozen=True)
class Rest:
    """Wait, then say `rested`."""

    job: Job
    delay_s: float


@dataclass(frozen=True)
class Fail:
    """The attempt has failed for good."""

    job: Job
    verdict: Verdict


Action = Prepare | Run | Grade | Rest | Fail


@dataclass(frozen=True)
class Counts:
    """How many attempts are where."""

    waiting: int
    preparing: int
    running: int
    grading: int
    done: int
    total: int


class Schedule:
    """The state. Each method that tells it something is followed by `decide`."""

    def __init__(self, jobs: Sequence[Job], limits: Limits) -> None:
        self._limits = limits
        self._total = len(jobs)
        self._waiting: deque[Job] = deque(jobs)
        self._graders: deque[Job] = deque()
        self._ready: set[str] = set()
        self._broken: dict[str, Verdict] = {}
        self._preparing: dict[str, int] = {}
        self._prepare_tries: dict[str, int] = {}
        self._again: deque[Prepare] = deque()
        self._failing: deque[Fail] = deque()
        self._resting: deque[Rest] = deque()
        self._asleep = 0
        self._running = 0
        self._grading = 0
        self._done = 0

    @property
    def finished(self) -> bool:
        return self._done == self._total

    def statistics(self) -> Counts:
        return Counts(
            waiting=len(self._waiting) + self._asleep,
            preparing=len(self._preparing),
            running=self._running,
            grading=self._grading + len(self._graders),
            done=self._done,
            total=self._total,
        )

    def decide(self) -> list[Action]:
        """What to start now. What it gives counts as started."""
        actions: list[Action] = [*self._failing, *self._resting, *self._again]
        self._failing.clear()
        self._resting.clear()
        self._again.clear()
        while self._graders and self._grading < self._limits.grading:
            self._grading += 1
            actions.append(Grade(self._graders.popleft()))
        passed: list[Job] = []
        while self._waiting and (self._places() > 0 or self._may_prepare()):
            job = self._waiting.popleft()
            environment = job.task.content_hash
            if environment in self._broken:
                self._done += 1
                actions.append(Fail(job, self._broken[environment]))
            elif environment in self._ready and self._places() > 0:
                self._running += 1
                job.tries += 1
                actions.append(Run(job))
            else:
                if environment not in self._ready and environment not in self._preparing and self._may_prepare():
                    self._preparing[environment] = 1
                    actions.append(Prepare(job.task))
                passed.append(job)
        self._waiting.extendleft(reversed(passed))
        return actions

    def prepared(self, task: Task) -> None:
        self._preparing.pop(task.content_hash, None)
        self._ready.add(task.content_hash)

    def prepare_failed(self, task: Task, verdict: Verdict) -> None:
        tries = self._preparing.get(task.content_hash, 1)
        if verdict.try_again and tries < self._limits.tries:
            self._preparing[task.content_hash] = tries + 1
            self._again.append(Prepare(task, self._backoff(tries)))
            return
        self._preparing.pop(task.content_hash, None)
        self._broken[task.content_hash] = verdict
        left: deque[Job] = deque()
        for job in self._waiting:
            if job.task.content_hash == task.content_hash:
                self._done += 1
                self._failing.append(Fail(job, verdict))
            else:
                left.append(job)
        self._waiting = left

    def ran(self, job: Job) -> None:
        self._running -= 1
        self._graders.append(job)

    def graded(self, job: Job) -> None:
        self._grading -= 1
        self._done += 1

    def failed(self, job: Job, verdict: Verdict, *, grading: bool) -> None:
        """A stage of an attempt failed; nothing of its sandboxes is left."""
        if grading:
            self._grading -= 1
        else:
            self._running -= 1
        if verdict.try_again and job.tries < self._limits.tries:
            self._asleep += 1
            self._resting.append(Rest(job, self._backoff(job.tries)))
        else:
            self._done += 1
            self._failing.append(Fail(job, verdict))

    def rested(self, job: Job) -> None:
        self._asleep -= 1
        self._waiting.append(job)

    def _places(self) -> int:
        return self._limits.in_flight - self._running - self._grading - len(self._graders)

    def _may_prepare(self) -> bool:
        return len(self._preparing) < self._limits.preparing

    def _backoff(self, tries: int) -> float:
        return self._limits.backoff_s * float(2 ** (tries - 1))

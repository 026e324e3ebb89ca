"""Tasks on disk, sandboxes in memory, a clock that only moves when someone sleeps."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sandmill.rollouts import Evaluation, Limits, NopAgent, OracleAgent, Record, RecordLog
from sandmill.rollouts.agents import Agent
from sandmill.rollouts.evaluation import Clock
from sandmill.rollouts.fake import FakeBox, FakeWorkshop, ended
from sandmill.tasks import Task
from sandmill.wire import Result


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.now_s, wall=lambda: self.now_s, sleep=self.sleep)


def write_task(folder: Path, config: str = "") -> Path:
    for name, text in {
        "task.toml": config,
        "instruction.md": "Make it so.\n",
        "environment/prepare.toml": 'image = "host"\n',
        "tests/test.sh": "#!/bin/sh\n",
        "solution/solve.sh": "#!/bin/sh\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def solve(box: FakeBox) -> Result:
    box.files["/app/answer"] = b"42"
    return ended()


def judge(box: FakeBox) -> Result:
    box.files["/logs/verifier/reward.txt"] = b"1\n" if "/app/answer" in box.files else b"0\n"
    return ended()


class Bench:
    """One evaluation after another on the same DIR."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = FakeTime()
        self.workshop = FakeWorkshop()
        self.workshop.on("/solution/solve.sh", solve)
        self.workshop.on("/tests/test.sh", judge)
        self.tasks = [Task.load(write_task(folder / "tasks" / "one"))]
        self.agents: list[Agent] = [OracleAgent()]
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, record: Record) -> None:
        pass

    async def run(self, k: int = 1, *, in_place: bool = False, limits: Limits | None = None) -> list[Record]:
        with RecordLog(self.folder / "out") as log:
            return await self.evaluation(log, k, in_place=in_place, limits=limits).run()

    def evaluation(
        self, log: RecordLog, k: int = 1, *, in_place: bool = False, limits: Limits | None = None
    ) -> Evaluation:
        return Evaluation(
            self.tasks,
            self.agents,
            k,
            self.workshop,
            log,
            self.folder / "out",
            in_place=in_place,
            limits=limits,
            clock=self.time.clock,
            watcher=self,
        )

    def nothing_left(self) -> bool:
        return not self.workshop.open_boxes and not self.workshop.images


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def nop() -> NopAgent:
    return NopAgent()


MakeTask = Callable[[str], Path]

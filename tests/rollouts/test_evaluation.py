"""Attempts from end to end, in memory: rewards, typed failures, retries, resuming, cancellation."""

import asyncio
import json

import pytest

from sandmill.errors import NodeError, PreparationError, SandmillError, TransportError
from sandmill.rollouts import CommandAgent, Limits, NopAgent, OracleAgent, RecordLog
from sandmill.rollouts.fake import FakeBox, ended
from sandmill.tasks import Task
from sandmill.wire import Result

from .conftest import Bench, judge, solve, write_task


async def test_oracle_is_rewarded_and_nop_is_not(bench: Bench) -> None:
    bench.agents = [OracleAgent(), NopAgent()]
    records = await bench.run(k=3)
    assert sorted((one.agent, one.reward) for one in records) == [("nop", 0.0)] * 3 + [("oracle", 1.0)] * 3
    assert len(bench.workshop.prepared) == 1
    assert bench.nothing_left()


async def test_grading_is_fresh_and_never_sees_what_the_agent_planted(bench: Bench) -> None:
    def cheat(box: FakeBox) -> Result:
        box.files["/logs/verifier/reward.txt"] = b"1"
        box.files["/tests/helper.py"] = b"cheat"
        return ended()

    def look(box: FakeBox) -> Result:
        assert "/tests/helper.py" not in box.files
        return ended()

    bench.workshop.on("/solution/solve.sh", cheat)
    bench.workshop.on("/tests/test.sh", look)
    (record,) = await bench.run()
    assert record.reward is None
    assert record.error is not None
    assert (record.error.type, record.error.code) == ("grader", "reward_missing")
    assert len(bench.workshop.boxes) == 2


async def test_in_place_ends_the_agents_processes_and_keeps_the_sandbox(bench: Bench) -> None:
    (record,) = await bench.run(in_place=True)
    assert (record.reward, record.grading) == (1.0, "in-place")
    (box,) = bench.workshop.boxes
    kill = next(at for at, line in enumerate(box.ran) if line.startswith("kill -9 -1"))
    assert box.ran.index("/solution/solve.sh") < kill < box.ran.index("/tests/test.sh")
    assert bench.nothing_left()


@pytest.mark.parametrize("call", ["create", "run", "usage", "commit", "upload", "read"])
async def test_broken_infrastructure_is_tried_again_in_a_fresh_sandbox(bench: Bench, call: str) -> None:
    bench.workshop.fail_next(call, TransportError("the line is cut"))
    (record,) = await bench.run()
    assert (record.reward, record.tries) == (1.0, 2)
    assert bench.time.slept == [1.0]
    assert bench.nothing_left()


async def test_tries_are_bounded_and_the_failure_is_no_reward(bench: Bench) -> None:
    bench.workshop.fail_next("create", *[NodeError("full", code="node_exhausted")] * 3)
    (record,) = await bench.run()
    assert record.reward is None
    assert record.error is not None
    assert (record.error.type, record.error.code, record.error.retryable) == ("infrastructure", "node_exhausted", True)
    assert record.tries == 3
    assert bench.time.slept == [1.0, 2.0]


@pytest.mark.parametrize(("cause", "kind", "tries"), [("oom", "limit", 1), ("crashed", "infrastructure", 3)])
async def test_a_sandbox_that_died_is_typed_with_its_cause(bench: Bench, cause: str, kind: str, tries: int) -> None:
    def die(box: FakeBox) -> Result:
        box.die(cause)
        return ended()

    bench.workshop.on("/solution/solve.sh", die)
    (record,) = await bench.run()
    assert record.error is not None
    assert (record.error.type, record.error.cause, record.tries, record.reward) == (kind, cause, tries, None)
    assert bench.nothing_left()


async def test_an_agent_that_ran_out_of_time_is_graded_as_it_stands(bench: Bench) -> None:
    def slow(box: FakeBox) -> Result:
        solve(box)
        return ended(None, reason="timeout")

    bench.workshop.on("/solution/solve.sh", slow)
    (record,) = await bench.run()
    assert (record.reward, record.agent_timed_out, record.error) == (1.0, True, None)
    assert record.agent_end is not None
    assert record.agent_end.exit_code is None


@pytest.mark.parametrize("written", [b"", b"one", b"nan", b"1 2"])
async def test_a_broken_reward_file_is_the_graders_error(bench: Bench, written: bytes) -> None:
    def scribble(box: FakeBox) -> Result:
        box.files["/logs/verifier/reward.txt"] = written
        return ended()

    bench.workshop.on("/tests/test.sh", scribble)
    (record,) = await bench.run()
    assert record.error is not None
    assert (record.error.type, record.error.code, record.tries) == ("grader", "reward_invalid", 1)


async def test_a_verifier_that_was_cut_off_has_no_say(bench: Bench) -> None:
    def cut(box: FakeBox) -> Result:
        judge(box)
        return ended(None, reason="timeout")

    bench.workshop.on("/tests/test.sh", cut)
    (record,) = await bench.run()
    assert record.error is not None
    assert record.error.code == "verifier_timeout"


async def test_a_failed_preparation_fails_its_attempts_and_no_others(bench: Bench) -> None:
    bench.tasks.append(Task.load(write_task(bench.folder / "tasks" / "two", "[metadata]\n")))
    bench.workshop.fail_next("prepare", PreparationError("step 1 failed", details={"output": "no such package"}))
    records = await bench.run(k=2, limits=Limits(preparing=1))
    failed = [one for one in records if one.error is not None]
    assert {one.task for one in failed} == {"one"}
    assert len(failed) == 2
    assert failed[0].error is not None
    assert failed[0].error.type == "preparation"
    assert "no such package" in failed[0].error.message
    assert [one.reward for one in records if one.task == "two"] == [1.0, 1.0]


async def test_a_bug_is_data_too(bench: Bench) -> None:
    bench.workshop.fail_next("usage", KeyError("oops"))
    (record,) = await bench.run()
    assert record.error is not None
    assert (record.error.type, record.error.code) == ("internal", "KeyError")
    assert bench.nothing_left()


async def test_cleanup_that_fails_is_told_beside_the_reward(bench: Bench) -> None:
    bench.workshop.fail_next("discard", NodeError("busy"))
    (record,) = await bench.run()
    assert record.reward == 1.0
    assert any("clean-up: busy" in note for note in bench.notes)


async def test_the_second_run_does_only_what_is_missing(bench: Bench) -> None:
    bench.workshop.fail_next("create", TransportError("cut"))
    first = await bench.run(k=2, limits=Limits(tries=1))
    assert sorted(one.reward is None for one in first) == [False, True]
    made = len(bench.workshop.boxes)
    records = await bench.run(k=2)
    assert [one.reward for one in records] == [1.0, 1.0]
    assert len(bench.workshop.boxes) == made + 2
    assert sorted(await bench.run(k=2), key=str) == sorted(records, key=str)
    assert len(bench.workshop.boxes) == made + 2


async def test_other_content_is_another_attempt(bench: Bench) -> None:
    await bench.run()
    (bench.tasks[0].folder / "tests" / "test.sh").write_text("#!/bin/sh\n# stricter\n")
    bench.tasks = [Task.load(bench.tasks[0].folder)]
    made = len(bench.workshop.boxes)
    await bench.run()
    assert len(bench.workshop.boxes) > made


async def test_the_instruction_reaches_a_command(bench: Bench) -> None:
    seen: dict[str, str] = {}

    def work(box: FakeBox) -> Result:
        seen.update(box.env)
        assert box.files[box.env["SANDMILL_INSTRUCTION_FILE"]] == b"Make it so.\n"
        return ended(1)

    bench.agents = [CommandAgent("my-agent --go")]
    bench.workshop.on("my-agent --go", work)
    (record,) = await bench.run()
    assert (record.reward, record.agent_end and record.agent_end.exit_code) == (0.0, 1)
    assert seen["SANDMILL_INSTRUCTION"] == "Make it so.\n"


@pytest.mark.parametrize("where", ["prepare", "create", "/solution/solve.sh", "/tests/test.sh"])
async def test_cancellation_leaves_nothing_and_no_record(bench: Bench, where: str) -> None:
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    async def hang_in(box: FakeBox) -> Result:
        await hang()
        raise SandmillError("never")

    if where.startswith("/"):
        bench.workshop.on(where, hang_in)
    else:
        bench.workshop.before(where, hang)
    with RecordLog(bench.folder / "out") as log:
        evaluation = asyncio.ensure_future(bench.evaluation(log, k=3).run())
        await reached.wait()
        evaluation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluation
        assert bench.nothing_left()
        assert log.read() == []


async def test_no_more_at_once_than_allowed(bench: Bench) -> None:
    most = 0

    async def watch(box: FakeBox) -> Result:
        nonlocal most
        most = max(most, len(bench.workshop.open_boxes))
        await asyncio.sleep(0)
        return solve(box)

    bench.workshop.on("/solution/solve.sh", watch)
    records = await bench.run(k=9, limits=Limits(in_flight=2))
    assert len(records) == 9
    assert most <= 2


async def test_logs_and_times_of_an_attempt(bench: Bench) -> None:
    async def work(box: FakeBox) -> Result:
        await bench.time.sleep(5)
        return ended(stdout=b"thinking")

    bench.workshop.on("/solution/solve.sh", work)
    (record,) = await bench.run()
    assert record.times.run_s == 5.0
    folder = bench.folder / "out" / "one" / "oracle.0"
    assert b"thinking" in (folder / "agent.txt").read_bytes()
    assert (folder / "verifier" / "reward.txt").read_text() == "0\n"
    line = (bench.folder / "out" / "records.jsonl").read_text()
    assert json.loads(line)["reward"] == 0.0

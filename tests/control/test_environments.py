"""Prepared environments: once for all who ask, whole or not there, failures with their step."""

import asyncio
import base64
import json
from typing import Any

import pytest

from sandmill.control import environments as module
from sandmill.control.environments import PrepareRequest
from sandmill.control.steps import Step, Take
from sandmill.errors import NodeError, NotFoundError, PreparationError, UsageError
from sandmill.wire import Exec, Result

from .conftest import World

REQUEST = PrepareRequest(steps=[Step(run="echo hi > /made")], workdir="/work")


class Gate:
    """A step that waits until it is let go."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.began = asyncio.Event()
        self.go = asyncio.Event()
        from .conftest import FakeStepIO

        before = FakeStepIO.run

        async def run(io: FakeStepIO, command: Exec) -> Result:
            self.runs += 1
            self.began.set()
            await self.go.wait()
            return await before(io, command)

        monkeypatch.setattr(FakeStepIO, "run", run)


async def test_once_and_then_from_the_store(world: World) -> None:
    first = await world.environments.prepare(REQUEST)
    assert first.image.startswith("env:")
    assert not first.cached
    again = await world.environments.prepare(REQUEST)
    assert (again.image, again.cached) == (first.image, True)
    view = await world.sandboxes.create(module.Wanted(image=first.image))
    assert view.info.workdir == "/work"
    assert world.node._boxes[view.record.id].files["/made"] == b"hi\n"


async def test_all_that_goes_in_counts(world: World) -> None:
    names = set()
    for request in (
        REQUEST,
        PrepareRequest(steps=[Step(run="echo hi > /made")]),
        PrepareRequest(steps=[Step(run="echo ho > /made")], workdir="/work"),
        PrepareRequest(steps=[Step(run="echo hi > /made")], workdir="/work", env={"A": "b"}),
        PrepareRequest(steps=[Step(run="echo hi > /made")], workdir="/work", network="none"),
    ):
        names.add((await world.environments.prepare(request)).image)
    assert len(names) == 5


async def test_files_and_tars(world: World) -> None:
    content = base64.b64encode(b"data").decode()
    request = PrepareRequest(steps=[Step(copy={"/a/b": content}), Step(tar=content, to="/c")])
    image = (await world.environments.prepare(request)).image
    view = await world.sandboxes.create(module.Wanted(image=image))
    files = world.node._boxes[view.record.id].files
    assert (files["/a/b"], files["/c/from.tar"]) == (b"data", b"data")


@pytest.mark.parametrize(
    "step",
    [
        Step(),
        Step(run="x", copy={}),
        Step(run="x", to="/"),
        Step(copy={"/a": "not base64!"}),
    ],
)
async def test_a_step_that_can_not_be(world: World, step: Step) -> None:
    with pytest.raises(UsageError, match=r"steps\[0\]"):
        await world.environments.prepare(PrepareRequest(steps=[step]))
    assert not world.node._boxes


async def test_a_failed_step_says_which_and_shows_its_output(world: World) -> None:
    request = PrepareRequest(steps=[Step(run="true"), Step(run="echo it broke; exit 3"), Step(run="true")])
    with pytest.raises(PreparationError) as failed:
        await world.environments.prepare(request)
    details = failed.value.details
    assert (details["step"], details["exit_code"], details["stdout"]) == (1, 3, "it broke\n")
    assert [image.names for image in await world.node.images()] == [["host"]]
    assert not world.node._boxes
    status, error = await world.call("POST", "/v1/environments", {"steps": [{"run": "exit 1"}]})
    assert (status, error["code"], error["details"]["step"]) == (422, "preparation_failed", 0)


async def test_a_missing_image(world: World) -> None:
    with pytest.raises(NotFoundError):
        await world.environments.prepare(PrepareRequest(image="nope"))


async def test_who_asks_meanwhile_waits_for_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(world, monkeypatch)
    calls = [asyncio.create_task(world.environments.prepare(REQUEST)) for _ in range(5)]
    await gate.began.wait()
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    gate.go.set()
    assert len({(await call).image for call in calls[1:]}) == 1
    assert gate.runs == 1
    assert world.environments.statistics().under_way == 0


async def test_work_that_nobody_waits_for_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    gate = Gate(world, monkeypatch)
    call = asyncio.create_task(world.environments.prepare(REQUEST))
    await gate.began.wait()
    call.cancel()
    for _ in range(200):
        await asyncio.sleep(0.002)
        if not world.environments.statistics().under_way and not world.node._boxes:
            break
    assert not world.node._boxes
    assert world.environments.statistics().under_way == 0
    assert [image.names for image in await world.node.images()] == [["host"]]


async def test_a_retry_within_the_grace_keeps_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(world, monkeypatch)
    call = asyncio.create_task(world.environments.prepare(REQUEST))
    await gate.began.wait()
    call.cancel()
    await asyncio.sleep(0)
    again = asyncio.create_task(world.environments.prepare(REQUEST))
    await asyncio.sleep(0.01)
    gate.go.set()
    assert not (await again).cached
    assert gate.runs == 1


@pytest.mark.parametrize("call", ["create", "run", "commit"])
async def test_a_node_that_fails_leaves_nothing(world: World, call: str) -> None:
    world.node.fail_next(call, NodeError("away", code="node_unavailable", retryable=True))
    failures: list[Any] = []
    try:
        await world.environments.prepare(REQUEST)
    except (NodeError, PreparationError) as error:
        failures.append(error)
    assert failures[0].retryable
    assert not world.node._boxes
    assert (await world.environments.prepare(REQUEST)).image.startswith("env:")


TAR = base64.b64encode(b"data").decode()


async def test_content_is_sent_only_if_it_is_needed(world: World) -> None:
    short = PrepareRequest(steps=[Step(digest="d", to="/c", about="short")])
    whole = PrepareRequest(steps=[Step(digest="d", to="/c", tar=TAR)])
    with pytest.raises(NotFoundError) as needed:
        await world.environments.prepare(short)
    assert needed.value.code == "content_needed"
    assert not world.node._boxes
    made = await world.environments.prepare(whole)
    again = await world.environments.prepare(short)
    assert (again.image, again.cached) == (made.image, True)
    other = PrepareRequest(steps=[Step(digest="e", to="/c", tar=TAR)])
    assert (await world.environments.prepare(other)).image != made.image


async def test_fresh_is_made_anew_under_the_same_name(world: World) -> None:
    first = await world.environments.prepare(REQUEST)
    before = (await world.node.image(first.image)).id
    again = await world.environments.prepare(PrepareRequest(steps=REQUEST.steps, workdir="/work", fresh=True))
    assert (again.image, again.cached) == (first.image, False)
    assert (await world.node.image(again.image)).id != before


async def test_nothing_at_all_is_an_image_too(world: World) -> None:
    first = await world.environments.prepare(PrepareRequest(image="scratch", steps=[Step(copy={"/a": TAR})]))
    assert [image.names for image in await world.node.images()] == [["host"], ["scratch"], [first.image]]


async def lines_of(world: World, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await world.answer("POST", "/v1/environments", body | {"stream": True})
    assert answer.stream is not None
    assert (answer.status, answer.content_type) == (200, b"application/x-ndjson")
    return [json.loads(line) for line in b"".join([piece async for piece in answer.stream]).splitlines()]


async def test_output_as_it_comes(world: World) -> None:
    body = {"steps": [{"run": "echo one"}, {"run": "echo two", "about": "the second"}]}
    *outputs, last = await lines_of(world, body)
    said = b"".join(base64.b64decode(line["output"]) for line in outputs).decode()
    assert said == "[0] run echo one\none\n[1] the second\ntwo\n"
    assert last["prepared"]["cached"] is False
    assert await lines_of(world, body) == [
        {"prepared": last["prepared"] | {"cached": True, "prepare_s": 0.0, "log": ""}}
    ]
    *_, failed = await lines_of(world, {"steps": [{"run": "exit 3"}]})
    assert (failed["status"], failed["error"]["code"], failed["error"]["details"]["how"]) == (
        422, "preparation_failed", "ended with 3",
    )  # fmt: skip
    assert (await lines_of(world, {"image": "nope"}))[0]["error"]["code"] == "image_not_found"


async def test_who_joins_reads_from_the_beginning_and_who_leaves_stops_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(world, monkeypatch)
    body = {"steps": [{"run": "echo one"}], "stream": True}
    first = await world.answer("POST", "/v1/environments", body)
    assert first.stream is not None
    assert b"output" in await anext(first.stream)
    await gate.began.wait()
    second = asyncio.create_task(lines_of(world, body))
    await asyncio.sleep(0)
    await first.stream.aclose()
    gate.go.set()
    *outputs, last = await second
    assert b"".join(base64.b64decode(line["output"]) for line in outputs) == b"[0] run echo one\none\n"
    assert "prepared" in last
    assert gate.runs == 1


async def test_a_log_keeps_the_latest_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_LIMIT_BYTES", 100)
    log = module.Log()
    for number in range(100):
        log.line(f"line {number}")
    assert log.text().endswith("line 98\nline 99\n")
    assert len(log.text()) == 100
    log.close()
    assert b"".join([piece async for piece in log.pieces()]).endswith(b"line 99\n")


@pytest.mark.parametrize(
    "step",
    [
        Step(argv=[]),
        Step(run="x", owner="root"),
        Step(run="x", digest="d"),
        Step(mkdir="/x", cwd="/"),
        Step(tar=TAR, mode="755"),
        Step(take=Take("host", ["/a"])),
        Step(take=Take("host", []), to="/a"),
        Step(take=Take("host", ["/a"]), to="/a", mode="9"),
    ],
)
async def test_fields_that_do_not_belong(world: World, step: Step) -> None:
    with pytest.raises(UsageError, match=r"steps\[0\]"):
        await world.environments.prepare(PrepareRequest(steps=[step]))

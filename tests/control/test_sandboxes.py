"""The use cases: no create is lost or doubled, of many kills one succeeds, and lists tell the truth."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.control import sandboxes as module
from sandmill.control.sandboxes import Sandboxes, Wanted, new_id
from sandmill.control.store import MemoryStore
from sandmill.errors import ConflictError, NodeError, NotFoundError, SandboxGoneError, TransportError, UsageError
from sandmill.wire import Lease, SandboxEnd, SandboxInfo, SandboxSpec

from .conftest import FakeNode, World, running

WANTED = Wanted(image="host")


class SlowNode(FakeNode):
    """Creates and ends wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.asked = asyncio.Event()
        self.creates = 0

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        self.creates += 1
        self.asked.set()
        await self.go.wait()
        return await super().create(spec)

    async def destroy(self, sandbox_id: str, cause: str = "killed") -> None:
        self.asked.set()
        await self.go.wait()
        await super().destroy(sandbox_id, cause)


async def live_at(node: FakeNode) -> set[str]:
    return {info.id for info in (await node.inventory()).live}


async def settle(node: FakeNode, expected: set[str]) -> None:
    """Waits (a few turns of the loop) until just those live."""
    for _ in range(200):
        if await live_at(node) == expected:
            return
        await asyncio.sleep(0.001)
    assert await live_at(node) == expected


def test_ids_are_of_the_form_that_the_gateway_splits() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 20 and one[0] == "i" and one.isalnum() and one.islower() for one in ids)


async def test_a_life(world: World) -> None:
    view = await world.sandboxes.create(Wanted(image="host", metadata={"a": "b"}))
    assert (await world.sandboxes.get(view.record.id)).record.metadata == {"a": "b"}
    await world.sandboxes.kill(view.record.id)
    with pytest.raises(SandboxGoneError) as gone:
        await world.sandboxes.get(view.record.id)
    assert gone.value.cause == "killed"
    assert await live_at(world.node) == set()


async def test_unknown_is_not_found(world: World) -> None:
    for call in (world.sandboxes.get, world.sandboxes.kill, world.sandboxes.usage):
        with pytest.raises(NotFoundError):
            await call("i0000000000000000000")


async def test_same_key_same_sandbox(world: World) -> None:
    first = await world.sandboxes.create(WANTED, "k")
    second = await world.sandboxes.create(WANTED, "k")
    assert first.record.id == second.record.id
    assert len(await live_at(world.node)) == 1
    with pytest.raises(ConflictError):
        await world.sandboxes.create(Wanted(image="host", name="other"), "k")


async def test_key_in_flight_waits() -> None:
    node = SlowNode()
    async with running(node, MemoryStore()) as world:
        calls = [asyncio.create_task(world.sandboxes.create(WANTED, "k")) for _ in range(5)]
        await node.asked.wait()
        with pytest.raises(ConflictError):
            await world.sandboxes.create(Wanted(image="host", name="other"), "k")
        node.go.set()
        assert len({(await call).record.id for call in calls}) == 1
        assert node.creates == 1


async def test_a_failed_create_frees_its_key(world: World) -> None:
    world.node.fail_next("create", NodeError("full", code="node_exhausted"))
    with pytest.raises(NodeError):
        await world.sandboxes.create(WANTED, "k")
    assert world.store.load() == []
    view = await world.sandboxes.create(WANTED, "k")
    assert await live_at(world.node) == {view.record.id}


async def test_key_of_an_ended_sandbox_never_makes_another(world: World) -> None:
    view = await world.sandboxes.create(WANTED, "k")
    await world.sandboxes.kill(view.record.id)
    with pytest.raises(SandboxGoneError):
        await world.sandboxes.create(WANTED, "k")


async def test_a_cancelled_create_is_undone() -> None:
    node = SlowNode()
    async with running(node, MemoryStore()) as world:
        call = asyncio.create_task(world.sandboxes.create(WANTED))
        await node.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        node.go.set()
        await settle(node, set())
        assert world.sandboxes.statistics().live == 0


async def test_a_cancelled_create_is_undone_at_every_await(world: World) -> None:
    for turns in range(6):
        call = asyncio.create_task(world.sandboxes.create(WANTED))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        try:
            view = await call
        except asyncio.CancelledError:
            await settle(world.node, set())
        else:
            await world.sandboxes.kill(view.record.id)


async def test_a_cancelled_create_with_a_key_waits_for_its_retry() -> None:
    node = SlowNode()
    async with running(node, MemoryStore()) as world:
        call = asyncio.create_task(world.sandboxes.create(WANTED, "k"))
        await node.asked.wait()
        call.cancel()
        node.go.set()
        await asyncio.sleep(0.01)
        view = await world.sandboxes.create(WANTED, "k")
        assert await live_at(node) == {view.record.id}
        assert node.creates == 1
        assert world.sandboxes.statistics().creating == 0


async def test_without_a_retry_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADOPT_S", 0.01)
    node = SlowNode()
    async with running(node, MemoryStore()) as world:
        call = asyncio.create_task(world.sandboxes.create(WANTED, "k"))
        await node.asked.wait()
        call.cancel()
        node.go.set()
        for _ in range(100):
            await asyncio.sleep(0.002)
            if world.sandboxes.statistics().tombstones:
                break
        await settle(node, set())
        with pytest.raises(SandboxGoneError):  # the key stands for what was made and undone
            await world.sandboxes.create(WANTED, "k")


async def test_one_of_two_waiters_going_changes_nothing() -> None:
    node = SlowNode()
    async with running(node, MemoryStore()) as world:
        first, second = (asyncio.create_task(world.sandboxes.create(WANTED, "k")) for _ in range(2))
        await node.asked.wait()
        await asyncio.sleep(0)
        first.cancel()
        node.go.set()
        view = await second
        await asyncio.sleep(0.01)
        assert await live_at(node) == {view.record.id}


async def test_an_answer_that_did_not_arrive_is_undone(world: World) -> None:
    answer = await world.answer("POST", "/v1/sandboxes", {})
    assert answer.status == 201
    assert answer.undelivered is not None
    answer.undelivered()
    await settle(world.node, set())


async def test_an_answer_that_did_not_arrive_is_kept_for_its_key(world: World) -> None:
    answer = await world.answer("POST", "/v1/sandboxes", {}, idempotency_key="k")
    assert answer.undelivered is not None
    answer.undelivered()
    await asyncio.sleep(0.01)
    status, again = await world.call("POST", "/v1/sandboxes", {}, idempotency_key="k")
    assert status == 201
    assert await live_at(world.node) == {again["id"]}


async def test_an_unknown_outcome_is_undone(world: World) -> None:
    class Lost(FakeNode):
        async def create(self, spec: SandboxSpec) -> SandboxInfo:
            await super().create(spec)
            raise TransportError("the connection broke")

    node = Lost()
    async with running(node, MemoryStore()) as lost:
        with pytest.raises(TransportError):
            await lost.sandboxes.create(WANTED)
        await settle(node, set())


async def test_of_many_kills_one_succeeds() -> None:
    node = SlowNode()
    node.go.set()
    async with running(node, MemoryStore()) as world:
        view = await world.sandboxes.create(WANTED)
        node.go.clear()
        node.asked.clear()
        kills = [asyncio.create_task(world.sandboxes.kill(view.record.id)) for _ in range(8)]
        await node.asked.wait()
        assert (await world.sandboxes.page({}, 10, None)).views == []
        with pytest.raises(SandboxGoneError) as gone:
            await world.sandboxes.get(view.record.id)
        assert gone.value.cause == "killed"
        node.go.set()
        done = await asyncio.gather(*kills, return_exceptions=True)
        assert done.count(None) == 1
        assert sum(isinstance(one, SandboxGoneError) for one in done) == 7


async def test_a_cancelled_kill_goes_on() -> None:
    node = SlowNode()
    node.go.set()
    async with running(node, MemoryStore()) as world:
        view = await world.sandboxes.create(WANTED)
        node.go.clear()
        node.asked.clear()
        kill = asyncio.create_task(world.sandboxes.kill(view.record.id))
        await node.asked.wait()
        kill.cancel()
        node.go.set()
        await settle(node, set())


async def test_a_kill_that_failed_can_be_tried_again(world: World) -> None:
    view = await world.sandboxes.create(WANTED)
    world.node.fail_next("destroy", NodeError("away", code="node_unavailable", retryable=True))
    with pytest.raises(NodeError):
        await world.sandboxes.kill(view.record.id)
    await world.sandboxes.kill(view.record.id)
    assert await live_at(world.node) == set()


async def test_an_end_that_the_node_tells_of(world: World) -> None:
    view = await world.sandboxes.create(WANTED)
    one = view.record.id
    world.node.end(one, "oom", "memory ran out")
    world.sandboxes.note_end(SandboxEnd(id=one, cause="oom", message="memory ran out", ended_at=world.node.now))
    with pytest.raises(SandboxGoneError, match="memory ran out") as gone:
        await world.sandboxes.get(one)
    assert gone.value.cause == "oom"


async def test_leases(world: World) -> None:
    view = await world.sandboxes.create(Wanted(image="host", lease=Lease(10.0)))
    one = view.record.id
    assert (await world.sandboxes.extend(one, 5.0)).info.expires_at == world.node.now + 10
    assert (await world.sandboxes.extend(one, 50.0)).info.expires_at == world.node.now + 50
    assert (await world.sandboxes.renew(one, 5.0)).info.expires_at == world.node.now + 5
    assert await world.sandboxes.renew_many({one: 20.0, "i0000000000000000000": 20.0}) == ["i0000000000000000000"]
    world.node.advance(19.0)
    await world.sandboxes.get(one)
    world.node.advance(2.0)
    with pytest.raises(SandboxGoneError) as gone:
        await world.sandboxes.get(one)
    assert gone.value.cause == "lease_expired"


async def test_a_commit_ends_it(world: World) -> None:
    view = await world.sandboxes.create(WANTED)
    image = await world.sandboxes.commit(view.record.id, "mine")
    assert image.names == ["mine"]
    with pytest.raises(SandboxGoneError) as gone:
        await world.sandboxes.get(view.record.id)
    assert gone.value.cause == "committed"


# Restarts


async def test_a_restart_finds_everything() -> None:
    node, store = FakeNode(), MemoryStore()
    async with running(node, store) as world:
        kept = await world.sandboxes.create(Wanted(image="host", metadata={"a": "b"}), "k")
        ended = await world.sandboxes.create(WANTED, "e")
        died = await world.sandboxes.create(WANTED)
        await world.sandboxes.kill(ended.record.id)
    node.end(died.record.id, "crashed", "killed by a stranger")
    async with running(node, store) as world:
        view = await world.sandboxes.get(kept.record.id)
        assert view.record == kept.record
        assert (await world.sandboxes.create(Wanted(image="host", metadata={"a": "b"}), "k")).record == kept.record
        with pytest.raises(SandboxGoneError) as gone:
            await world.sandboxes.create(WANTED, "e")
        assert gone.value.cause == "killed"
        with pytest.raises(SandboxGoneError) as gone:
            await world.sandboxes.get(died.record.id)
        assert gone.value.cause == "crashed"


async def test_a_crash_between_the_nodes_create_and_the_record_doubles_nothing() -> None:
    node, store = FakeNode(), MemoryStore()
    await node.create(SandboxSpec(id=new_id(), image="host", token="t"))  # nobody was told of it
    async with running(node, store) as world:
        view = await world.sandboxes.create(WANTED, "k")
        await settle(node, {view.record.id})


async def test_a_stranger_is_ended() -> None:
    node = FakeNode()
    await node.create(SandboxSpec(id=new_id(), image="host", token="t"))
    async with running(node, MemoryStore()):
        await settle(node, set())


async def test_tombstones_and_keys_are_forgotten_in_time(world: World) -> None:
    view = await world.sandboxes.create(WANTED, "k")
    await world.sandboxes.kill(view.record.id)
    world.node.now += module.TOMBSTONE_S + 1
    world.sandboxes.prune()
    assert world.store.load() == []
    assert world.sandboxes.statistics().idempotency_keys == 0
    with pytest.raises(NotFoundError):
        await world.sandboxes.get(view.record.id)


async def test_tombstones_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOMBSTONES", 3)
    for _ in range(6):
        await world.sandboxes.kill((await world.sandboxes.create(WANTED)).record.id)
    world.sandboxes.prune()
    assert world.sandboxes.statistics().tombstones == 3


# Lists


async def sweep(sandboxes: Sandboxes, limit: int, newest_first: bool, between: Any = None) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await sandboxes.page({}, limit, cursor, newest_first)
        assert len(page.views) <= limit
        found += [view.record.id for view in page.views]
        cursor = page.cursor
        if cursor is None:
            return found
        if between is not None:
            await between()


@given(
    count=st.integers(0, 12),
    limit=st.integers(1, 5),
    newest_first=st.booleans(),
    spread=st.floats(0, 2),
    doomed=st.sets(st.integers(0, 11)),
)
@settings(max_examples=60, deadline=None)
async def test_who_lives_through_a_sweep_is_in_it_once(
    count: int, limit: int, newest_first: bool, spread: float, doomed: set[int]
) -> None:
    node = FakeNode()
    async with running(node, MemoryStore()) as world:
        ids = []
        for _ in range(count):
            ids.append((await world.sandboxes.create(WANTED)).record.id)
            node.now += spread
        to_kill = [ids[number] for number in doomed if number < count]

        async def kill_one() -> None:
            if to_kill:
                await world.sandboxes.kill(to_kill.pop())

        found = await sweep(world.sandboxes, limit, newest_first, kill_one)
        assert len(found) == len(set(found))
        assert await live_at(node) <= set(found)
        ordered = await sweep(world.sandboxes, limit, newest_first)
        if spread > 0.001:
            survivors = [one for one in ids if one in ordered]
            assert ordered == (survivors[::-1] if newest_first else survivors)


async def test_a_wrong_cursor_is_a_mistake(world: World) -> None:
    with pytest.raises(UsageError):
        await world.sandboxes.page({}, 10, "nonsense")


KEYS = st.sampled_from(["k1", "k2", None])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), KEYS, st.sampled_from(["a", "b"])),
        st.tuples(st.just("cancel"), KEYS, st.integers(0, 4)),
        st.tuples(st.just("kill"), st.integers(0, 5), st.none()),
        st.tuples(st.just("fail"), st.none(), st.none()),
        st.tuples(st.just("restart"), st.none(), st.none()),
        st.tuples(st.just("advance"), st.floats(0, 200), st.none()),
    ),
    max_size=14,
)


@given(actions=ACTIONS)
@settings(max_examples=80, deadline=None)
async def test_never_lost_never_doubled(actions: list[tuple[str, Any, Any]]) -> None:
    """Whatever clients do, a key stands for one sandbox, and we and the node agree about what lives."""
    node, store = FakeNode(), MemoryStore()
    made: dict[str, tuple[str, str]] = {}
    known: list[str] = []
    for action, first, second in [*actions, ("restart", None, None)]:
        async with running(node, store) as world:
            sandboxes = world.sandboxes
            try:
                if action == "create":
                    view = await sandboxes.create(Wanted(image="host", name=second), first)
                    known.append(view.record.id)
                    if first is not None:
                        assert made.setdefault(first, (second, view.record.id)) == (second, view.record.id)
                elif action == "cancel":
                    call = asyncio.create_task(sandboxes.create(Wanted(image="host", name="a"), first))
                    for _ in range(second):
                        await asyncio.sleep(0)
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                    await asyncio.sleep(0.001)
                elif action == "kill" and known:
                    await sandboxes.kill(known[first % len(known)])
                elif action == "fail":
                    node.fail_next("create", NodeError("full", code="node_exhausted"))
                elif action == "advance":
                    node.advance(first)
            except (NodeError, ConflictError, SandboxGoneError, NotFoundError):
                pass
            await sandboxes.reconcile()
            await asyncio.sleep(0.001)
            listed = {view.record.id for view in (await sandboxes.page({}, 1000, None)).views}
            assert listed == await live_at(node)
            for key, (name, one) in made.items():
                if one in listed:
                    assert (await sandboxes.create(Wanted(image="host", name=name), key)).record.id == one

"""E2B's dialect: its names, statuses and error bodies; what it can't do here is said."""

import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.control.store import MemoryStore
from sandmill.errors import NodeError

from .conftest import FakeNode, World, running

NEW = {"templateID": "base"}


async def create(world: World, **fields: Any) -> str:
    status, made = await world.call("POST", "/v2/sandboxes", {**NEW, **fields})
    assert status == 201, made
    return str(made["sandboxID"])


async def test_create_answers_what_the_sdk_reads(world: World) -> None:
    status, made = await world.call("POST", "/v2/sandboxes", {**NEW, "metadata": {"a": "b"}, "envVars": {"X": "1"}})
    assert status == 201
    assert set(made) == {"templateID", "sandboxID", "clientID", "alias", "envdVersion", "envdAccessToken", "domain"}
    box = world.node._boxes[made["sandboxID"]]
    assert (box.spec.image, box.spec.user, box.spec.workdir) == ("host", "user", "/home/user")
    assert (box.spec.network, box.spec.env, box.spec.lease.renew_on_use) == ("all", {"X": "1"}, False)


@pytest.mark.parametrize(("path", "lifetime"), [("/sandboxes", 15), ("/v2/sandboxes", 300)])
async def test_default_lifetimes(world: World, path: str, lifetime: int) -> None:
    _, made = await world.call("POST", path, NEW)
    assert world.node._boxes[made["sandboxID"]].expires_at == world.node.now + lifetime


@pytest.mark.parametrize(
    ("fields", "network"),
    [
        ({"allow_internet_access": False}, "none"),
        ({"allow_internet_access": True}, "all"),
        ({"network": {"denyOut": ["0.0.0.0/0"]}}, "none"),
        ({"network": {"allowOut": [], "allowPublicTraffic": True}}, "all"),
    ],
)
async def test_network(world: World, fields: dict[str, Any], network: str) -> None:
    assert world.node._boxes[await create(world, **fields)].spec.network == network


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"autoPause": True}, "autoPause"),
        ({"autoResume": {"enabled": True}}, "autoResume"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"mcp": {"x": {}}}, "mcp"),
        ({"network": {"allowOut": ["1.1.1.1"]}}, "network.allowOut"),
        ({"network": {"denyOut": ["10.0.0.0/8"]}}, "network.denyOut"),
    ],
)
async def test_what_is_not_there_yet_is_said(world: World, fields: dict[str, Any], named: str) -> None:
    status, error = await world.call("POST", "/v2/sandboxes", {**NEW, **fields})
    assert (status, error["code"], error["error_code"]) == (501, 501, "not_implemented")
    assert named in error["message"]
    assert not world.node._boxes


@pytest.mark.parametrize("call", ["pause", "resume", "fork", "snapshots"])
async def test_later_calls(world: World, call: str) -> None:
    status, error = await world.call("POST", f"/sandboxes/{await create(world)}/{call}", {})
    assert (status, error["error_code"]) == (501, "not_implemented")


@pytest.mark.parametrize(
    "fields", [{"timeout": 0}, {"timeout": -1}, {"timeout": 1e9}, {"metadata": {"a": 1}}, {"envVars": []}]
)
async def test_mistakes_name_their_field(world: World, fields: dict[str, Any]) -> None:
    status, error = await world.call("POST", "/v2/sandboxes", {**NEW, **fields})
    assert (status, error["code"], error["error_code"]) == (400, 400, "invalid_argument")
    assert f"$.{next(iter(fields))}" in error["message"]


async def test_a_missing_template(world: World) -> None:
    status, error = await world.call("POST", "/v2/sandboxes", {"templateID": "nope"})
    assert (status, error["code"], error["error_code"]) == (404, 404, "image_not_found")


async def test_detail_and_list(world: World) -> None:
    one = await create(world, metadata={"a": "b"}, timeout=60)
    status, detail = await world.call("GET", f"/sandboxes/{one}")
    assert status == 200
    assert detail["state"] == "running"
    assert detail["metadata"] == {"a": "b"}
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert detail["startedAt"] < detail["endAt"]
    for name in ("templateID", "clientID", "cpuCount", "memoryMB", "diskSizeMB", "envdVersion", "envdAccessToken"):
        assert name in detail
    status, listed = await world.call("GET", "/sandboxes")
    assert status == 200
    assert [item["sandboxID"] for item in listed] == [one]
    assert "envdAccessToken" not in listed[0]


async def test_gone_is_not_found_for_e2b(world: World) -> None:
    one = await create(world)
    assert (await world.answer("DELETE", f"/sandboxes/{one}")).status == 204
    for method, path in (("DELETE", ""), ("GET", ""), ("POST", "/timeout"), ("POST", "/connect"), ("GET", "/metrics")):
        status, error = await world.call(
            method, f"/sandboxes/{one}{path}", {"timeout": 5} if method == "POST" else None
        )
        assert (status, error["code"], error["error_code"]) == (404, 404, "sandbox_gone")


async def test_timeouts(world: World) -> None:
    one = await create(world, timeout=100)
    box = world.node._boxes[one]
    assert (await world.answer("POST", f"/sandboxes/{one}/timeout", {"timeout": 10})).status == 204
    assert box.expires_at == world.node.now + 10
    assert (await world.answer("POST", f"/sandboxes/{one}/refreshes", {"duration": 5})).status == 204
    assert box.expires_at == world.node.now + 10
    assert (await world.answer("POST", f"/sandboxes/{one}/refreshes", {"duration": 50})).status == 204
    assert box.expires_at == world.node.now + 50
    for path in ("/sandboxes", "/v2/sandboxes"):
        status, made = await world.call("POST", f"{path}/{one}/connect", {"timeout": 20})
        assert (status, made["sandboxID"]) == (200, one)
        assert box.expires_at == world.node.now + 50
    assert (await world.answer("POST", f"/sandboxes/{one}/timeout", {"timeout": 0})).status == 204
    world.node.advance(0.01)
    assert (await world.answer("GET", f"/sandboxes/{one}")).status == 404


def sdk_filter(metadata: dict[str, str]) -> str:
    """As the SDKs encode it."""
    pairs = {quote(name): quote(value) for name, value in metadata.items()}
    return urlencode({"metadata": urlencode(pairs)})


@given(metadata=st.dictionaries(st.text(min_size=1, max_size=300), st.text(max_size=300), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
async def test_any_metadata_is_stored_and_found_exactly(metadata: dict[str, str]) -> None:
    try:
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no text; JSON on the wire can't hold it
    async with running(FakeNode(), MemoryStore()) as world:
        one = await create(world, metadata=metadata)
        await create(world, metadata={name: value + "x" for name, value in metadata.items()})
        _, found = await world.call("GET", f"/v2/sandboxes?{sdk_filter(metadata)}")
        assert [(item["sandboxID"], item["metadata"]) for item in found] == [(one, metadata)]


@pytest.mark.parametrize("value", ["/a/b c&d=\u00e9", "x" * 300, "", "100%", "a+b", "%2F", "a=b&c=d"])
async def test_odd_metadata(world: World, value: str) -> None:
    one = await create(world, metadata={"k": value})
    await create(world)
    _, found = await world.call("GET", f"/v2/sandboxes?{sdk_filter({'k': value})}")
    assert [item["sandboxID"] for item in found] == [one]


async def test_pages(world: World) -> None:
    ids = []
    for _ in range(7):
        ids.append(await create(world))
        world.node.now += 1
    found: list[str] = []
    token = ""
    while True:
        answer = await world.answer("GET", f"/v2/sandboxes?limit=3&nextToken={quote(token)}")
        found += [item["sandboxID"] for item in json.loads(answer.body)]
        token = dict(answer.headers).get("x-next-token", "")
        if not token:
            break
    assert found == ids[::-1]
    _, ascending = await world.call("GET", "/v2/sandboxes?order=asc&limit=2")
    assert [item["sandboxID"] for item in ascending] == ids[:2]


async def test_filters(world: World) -> None:
    await create(world)
    for query, count in (("state=running", 1), ("state=paused", 0), ("state=running,paused", 1), ("template=base", 1),
                         ("template=other", 0), ("startedAfter=2100-01-01T00:00:00%2B00:00", 0)):  # fmt: skip
        status, found = await world.call("GET", f"/v2/sandboxes?{query}")
        assert (status, len(found)) == (200, count), query
    for query in ("state=nonsense", "order=up", "limit=0", "limit=x", "startedAfter=now", "nextToken=x"):
        assert (await world.answer("GET", f"/v2/sandboxes?{query}")).status == 400, query


async def test_metrics(world: World) -> None:
    one = await create(world)
    world.node.advance(1)
    status, (metric,) = await world.call("GET", f"/sandboxes/{one}/metrics")
    assert status == 200
    assert set(metric) == {
        "timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed", "diskTotal",
    }  # fmt: skip
    _, many = await world.call("GET", f"/sandboxes/metrics?sandbox_ids={one},i0000000000000000000")
    assert set(many["sandboxes"]) == {one}
    assert (await world.call("GET", f"/sandboxes/{one}/metrics?end=1"))[1] == []


async def test_templates(world: World) -> None:
    status, (template,) = await world.call("GET", "/templates")
    assert (status, template["templateID"], template["isDefault"]) == (200, "base", True)


async def test_idempotency(world: World) -> None:
    first = await world.call("POST", "/v2/sandboxes", NEW, idempotency_key="k-1")
    assert await world.call("POST", "/v2/sandboxes", NEW, idempotency_key="k-1") == first
    status, error = await world.call("POST", "/v2/sandboxes", {**NEW, "timeout": 7}, idempotency_key="k-1")
    assert (status, error["error_code"]) == (409, "idempotency_conflict")


async def test_retryable_failures_say_so(world: World) -> None:
    world.node.fail_next("create", NodeError("full", code="node_exhausted", retryable=True))
    answer = await world.answer("POST", "/v2/sandboxes", NEW)
    assert answer.status == 503
    assert dict(answer.headers)["Should-Retry"] == "true"
    world.node.fail_next("create", NodeError("broken", code="create_failed"))
    answer = await world.answer("POST", "/v2/sandboxes", NEW)
    assert dict(answer.headers)["Should-Retry"] == "false"

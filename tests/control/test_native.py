"""`/v1`, the key, the document, and errors as answers."""

from typing import Any

import pytest

from sandmill.control.openapi import describe
from sandmill.errors import ImageError, NodeError

from .conftest import DATA_URL, KEY, World


async def test_a_life(world: World) -> None:
    body = {"memory_mb": 64, "metadata": {"a": "b"}, "name": "n" * 64, "lease_s": 30}
    status, made = await world.call("POST", "/v1/sandboxes", body)
    assert status == 201
    assert (made["data_url"], made["metadata"], made["name"]) == (DATA_URL, {"a": "b"}, "n" * 64)
    assert made["limits"]["memory_bytes"] == 64 << 20
    one = f"/v1/sandboxes/{made['id']}"
    assert (await world.call("GET", one))[1]["access_token"] == made["access_token"]
    status, renewed = await world.call("POST", f"{one}/lease", {"ttl_s": 99})
    assert (status, renewed["expires_at"]) == (200, world.node.now + 99)
    assert (await world.call("GET", f"{one}/usage"))[0] == 200
    status, page = await world.call("GET", "/v1/sandboxes?metadata.a=b")
    assert (status, [item["id"] for item in page["sandboxes"]], page["next_cursor"]) == (200, [made["id"]], None)
    assert (await world.call("GET", "/v1/sandboxes?metadata.a=c"))[1]["sandboxes"] == []
    assert (await world.answer("DELETE", one)).status == 204
    status, error = await world.call("GET", one)
    assert (status, error["code"], error["details"]["cause"]) == (410, "sandbox_gone", "killed")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"memory_mb": 0}, "memory_mb"),
        ({"cpu": -1}, "cpu"),
        ({"lease_s": 0}, "lease_s"),
        ({"network": "some"}, "network"),
        ({"name": ""}, "name"),
        ({"image": ""}, "image"),
        ({"memory_gb": 1}, "memory_gb"),
        ({"env": {"A": 1}}, "env"),
    ],
)
async def test_mistakes_name_their_field(world: World, body: dict[str, Any], field: str) -> None:
    status, error = await world.call("POST", "/v1/sandboxes", body)
    assert (status, error["code"]) == (400, "invalid_argument")
    assert field in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"name": "\xff"}'])
async def test_a_body_that_is_none(world: World, body: bytes) -> None:
    assert (await world.answer("POST", "/v1/sandboxes", body)).status == 400


async def test_the_key(world: World) -> None:
    for headers, status in (
        ({"x_api_key": KEY}, 200),
        ({"x_api_key": "e2b_" + "1" * 40}, 401),
        ({"x_api_key": ""}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
    ):
        if "authorization" in headers:
            from sandmill.control.http import Request

            request = Request("GET", "/v1/images", "", {b"authorization": headers["authorization"].encode()}, True)
            assert (await world.app.answer(request)).status == status
        else:
            assert (await world.answer("GET", "/v1/images", None, **headers)).status == status


async def test_calls_that_are_none(world: World) -> None:
    assert (await world.call("GET", "/v1/nonsense"))[1]["code"] == "unknown_call"
    status, error = await world.call("PUT", "/v1/sandboxes")
    assert (status, error["code"], error["hint"]) == (405, "method_not_allowed", "it takes GET, POST")
    status, error = await world.call("GET", "/nonsense")
    assert (status, error["code"]) == (404, 404)


async def test_a_bug_is_an_answer(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.node.images = None  # type: ignore[assignment, method-assign]
    status, error = await world.call("GET", "/v1/images")
    assert (status, error["code"]) == (500, "internal")
    assert "Traceback" in caplog.text


async def test_images(world: World) -> None:
    assert (await world.call("POST", "/v1/images/import", {"path": "/x.tar", "name": "a/b:1"}))[0] == 201
    assert (await world.call("GET", "/v1/images/a%2Fb%3A1"))[1]["names"] == ["a/b:1"]
    await world.call("POST", "/v1/sandboxes", {"image": "a/b:1"})
    assert (await world.call("DELETE", "/v1/images/a%2Fb%3A1"))[1]["code"] == "image_in_use"
    assert (await world.call("POST", "/v1/sandboxes", {"image": "nope"}))[1]["code"] == "image_not_found"


async def test_an_image_comes_from_its_registry(world: World) -> None:
    never = {"image": "tool:1", "pull": "never"}
    assert (await world.call("POST", "/v1/sandboxes", never))[1]["code"] == "image_not_found"
    assert (await world.call("POST", "/v1/sandboxes", {"image": "tool:1"}))[0] == 201
    assert (await world.call("GET", "/v1/images/tool%3A1"))[0] == 200
    status, answer = await world.call("POST", "/v1/images/gc", {"all": True, "imported": True})
    assert (status, answer["removed"]) == (200, []), "a sandbox runs on it"
    assert (await world.call("POST", "/v1/images/gc", {"every": True}))[0] in (400, 422)
    limited = ImageError("wait", code="image_rate_limited", hint="wait", retryable=True, status=429)
    world.node.fail_next("pull_image", limited)
    status, answer = await world.call("POST", "/v1/sandboxes", {"image": "other:1"})
    assert (status, answer["code"], answer["retryable"]) == (429, "image_rate_limited", True)
    assert "there is no image 'other:1' here" in answer["message"]
    for ours in ("env:0123", "sha256:" + "0" * 64):
        assert (await world.call("POST", "/v1/sandboxes", {"image": ours}))[1]["code"] == "image_not_found"
    assert (await world.call("GET", "/v1/pulls"))[1] == {"pulls": []}


async def test_health(world: World) -> None:
    assert (await world.call("GET", "/v1/health"))[1]["status"] == "ok"

    async def away() -> dict[str, Any]:
        raise NodeError("noded is away", code="node_unavailable", retryable=True)

    world.node.health = away  # type: ignore[method-assign]
    status, health = await world.call("GET", "/v1/health")
    assert (status, health["status"]) == (503, "node_unavailable")


async def test_leases(world: World) -> None:
    _, made = await world.call("POST", "/v1/sandboxes", {})
    status, answer = await world.call("POST", "/v1/leases", {"renew": {made["id"]: 5.0, "i0": 5.0}})
    assert (status, answer) == (200, {"gone": ["i0"]})


async def test_the_document_has_every_route_and_no_other(world: World) -> None:
    status, document = await world.call("GET", "/openapi.json")
    assert status == 200
    assert document["openapi"] == "3.1.0"
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert documented == {(route.method, route.path) for route in world.app.routes}
    operations = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(operations) == len(set(operations))


async def test_the_document_refers_to_nothing_that_is_not_there(world: World) -> None:
    document = describe(world.app.routes)
    names = set(document["components"]["schemas"])

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"].rsplit("/", 1)[1]} if "$ref" in value else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    assert references(document) <= names
    create = document["paths"]["/v1/sandboxes"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("CreateSandbox")
    assert {"201", "400", "401", "409"} <= set(create["responses"])

"""Sandmill's own dialect, `/v1`: translation only; the decisions are the use cases'."""

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from sandmill.control.environments import Environments, Log, Prepared, PrepareRequest
from sandmill.control.http import Answer
from sandmill.control.node import Node
from sandmill.control.routes import Call, Query, Route
from sandmill.control.sandboxes import Sandboxes, View, Wanted
from sandmill.errors import SandmillError, ServerError, UsageError
from sandmill.wire import (
    Collected,
    Collection,
    CreateSandbox,
    ImageInfo,
    Lease,
    LimitSpec,
    Pulling,
    SandboxView,
    Usage,
)

MIB = 1024 * 1024
ENVIRONMENT_LIMIT_BYTES = 256 * MIB
NETWORKS = ("none", "all")

logger = logging.getLogger("sandmill.native")


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From now on this many seconds."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0)]
    renew_on_use: bool | None = None


class LeasesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    renew: dict[str, float]


class LeasesAnswer(msgspec.Struct, frozen=True):
    gone: list[str]


class SandboxPage(msgspec.Struct, frozen=True):
    sandboxes: list[SandboxView]
    next_cursor: str | None


class CommitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str | None = None
    config: dict[str, Any] | None = None


class ImageList(msgspec.Struct, frozen=True):
    images: list[ImageInfo]


class ImportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`path` is on the server's machine."""

    path: str
    name: str | None = None
    format: Literal["auto", "oci", "docker-archive", "tar", "dir"] = "auto"


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`credentials`: `{"username", "password"}` or `{"identity_token"}`; without: what `docker login` left on the server."""

    name: str
    newest: bool = False
    credentials: dict[str, str] | None = None


class PullList(msgspec.Struct, frozen=True):
    pulls: list[Pulling]


class Health(msgspec.Struct, frozen=True):
    status: str
    version: str
    data_url: str
    node: dict[str, Any]
    sandboxes: dict[str, int]


class Native:
    """Handlers of `/v1`."""

    def __init__(self, sandboxes: Sandboxes, environments: Environments, node: Node, data_url: str) -> None:
        self._sandboxes = sandboxes
        self._environments = environments
        self._node = node
        self._data_url = data_url

    def routes(self) -> Sequence[Route]:
        one = "/v1/sandboxes/{id}"
        image = "/v1/images/{name}"
        gone = (404, 410)
        paging = (
            Query("limit", "how many, up to 1000", "integer"),
            Query("cursor", "next_cursor of the page before"),
            Query("metadata.KEY", "only those whose metadata KEY has this value"),
        )
        return (
            Route("POST", "/v1/sandboxes", self.create, "Make a sandbox", "native", CreateSandbox, SandboxView, 201,
                  errors=(400, 403, 404, 409, 422, 429, 502, 503)),
            Route("GET", "/v1/sandboxes", self.list, "Sandboxes that run", "native", None, SandboxPage, query=paging),
            Route("GET", one, self.get, "One sandbox", "native", None, SandboxView, errors=gone),
            Route("DELETE", one, self.kill, "End a sandbox", "native", status=204, errors=gone),
            Route("POST", f"{one}/lease", self.lease, "Set the end of its lease", "native", LeaseRequest, SandboxView,
                  errors=(400, *gone)),
            Route("GET", f"{one}/usage", self.usage, "What it consumes", "native", None, Usage, errors=gone),
            Route("POST", f"{one}/commit", self.commit, "End it and keep its changes as an image", "native",
                  CommitRequest, ImageInfo, 201, errors=gone),
            Route("POST", "/v1/leases", self.leases, "Renew many leases", "native", LeasesRequest, LeasesAnswer),
            Route("GET", "/v1/images", self.images, "All images", "native", None, ImageList),
            Route("POST", "/v1/images/import", self.import_image, "Import an image", "native", ImportRequest, ImageInfo,
                  201, errors=(400, 422)),
            Route("POST", "/v1/images/pull", self.pull, "Fetch an image from its registry", "native", PullRequest,
                  ImageInfo, errors=(400, 403, 404, 429, 502)),
            Route("GET", "/v1/pulls", self.pulls, "Pulls that go on", "native", None, PullList),
            Route("POST", "/v1/images/gc", self.collect, "Remove unused images", "native", Collection, Collected,
                  errors=(400,)),
            Route("GET", image, self.image, "One image", "native", None, ImageInfo, errors=(404,)),
            Route("DELETE", image, self.remove_image, "Remove an image", "native", status=204, errors=(404, 409)),
            Route("POST", "/v1/environments", self.prepare, "Prepare an environment", "native", PrepareRequest, Prepared,
                  errors=(400, 403, 404, 422, 429, 502), body_limit_bytes=ENVIRONMENT_LIMIT_BYTES),
            Route("GET", "/v1/health", self.health, "How the server is", "open", None, Health),
            Route("GET", "/v1/doctor", self.doctor, "What the machine gives and lacks", "native", None, dict[str, Any]),
        )  # fmt: skip

    async def create(self, call: Call, body: CreateSandbox) -> Answer:
        wanted = wanted_of(body)
        view = await self._sandboxes.create(wanted, idempotency_key(call))
        one = view.record.id
        content = msgspec.json.encode(self._view(view))
        return Answer(201, content, undelivered=lambda: self._sandboxes.undelivered(one))

    async def list(self, call: Call, _: None) -> SandboxPage:
        metadata = {name.removeprefix("metadata."): v for name, v in call.query if name.startswith("metadata.")}
        limit = call.integer("limit", 100, 1, 1000)
        page = await self._sandboxes.page(metadata, limit, call.text("cursor"))
        return SandboxPage([self._view(view) for view in page.views], page.cursor)

    async def get(self, call: Call, _: None) -> SandboxView:
        return self._view(await self._sandboxes.get(call.params["id"]))

    async def kill(self, call: Call, _: None) -> None:
        await self._sandboxes.kill(call.params["id"])

    async def lease(self, call: Call, body: LeaseRequest) -> SandboxView:
        return self._view(await self._sandboxes.renew(call.params["id"], body.ttl_s, body.renew_on_use))

    async def leases(self, call: Call, body: LeasesRequest) -> LeasesAnswer:
        return LeasesAnswer(await self._sandboxes.renew_many(body.renew))

    async def usage(self, call: Call, _: None) -> Usage:
        return await self._sandboxes.usage(call.params["id"])

    async def commit(self, call: Call, body: CommitRequest) -> ImageInfo:
        return await self._sandboxes.commit(call.params["id"], body.name, body.config)

    async def images(self, call: Call, _: None) -> ImageList:
        return ImageList(await self._node.images())

    async def image(self, call: Call, _: None) -> ImageInfo:
        return await self._node.image(call.params["name"])

    async def import_image(self, call: Call, body: ImportRequest) -> ImageInfo:
        return await self._node.import_image(body.path, body.name, body.format)

    async def pull(self, call: Call, body: PullRequest) -> ImageInfo:
        return await self._node.pull_image(body.name, newest=body.newest, credentials=body.credentials)

    async def pulls(self, call: Call, _: None) -> PullList:
        return PullList(await self._node.pulls())

    async def collect(self, call: Call, body: Collection) -> Collected:
        return await self._node.collect_images(body)

    async def remove_image(self, call: Call, _: None) -> None:
        await self._node.remove_image(call.params["name"])

    async def prepare(self, call: Call, body: PrepareRequest) -> Prepared | Answer:
        if body.stream:
            return Answer(200, content_type=b"application/x-ndjson", stream=self._prepare_live(body))
        return await self._environments.prepare(body)

    async def _prepare_live(self, body: PrepareRequest) -> AsyncGenerator[bytes, None]:
        log = Log()
        task = asyncio.ensure_future(self._environments.prepare(body, log))
        task.add_done_callback(lambda _: log.close())
        try:
            async for piece in log.pieces():
                yield _line({"output": base64.b64encode(piece).decode()})
            yield _line({"prepared": await task})
        except SandmillError as error:
            yield _line({"error": error.as_wire(), "status": error.status or 422})
        except Exception:
            # As in App.answer: a bug of ours is an answer.
            logger.exception("preparing %s", body.image)
            bug = ServerError("a bug of sandmill: the server's log has its trace", hint="please report it")
            yield _line({"error": bug.as_wire(), "status": 500})
        finally:
            task.cancel()

    async def health(self, call: Call, _: None) -> Answer:
        from sandmill.control.version import version

        statistics = self._sandboxes.statistics()
        counts = {"live": statistics.live, "creating": statistics.creating, "ending": statistics.ending}
        try:
            node = await self._node.health()
        except SandmillError as error:
            health = Health("node_unavailable", version(), self._data_url, {"error": error.message}, counts)
            return Answer(503, msgspec.json.encode(health))
        return Answer(200, msgspec.json.encode(Health("ok", version(), self._data_url, node, counts)))

    async def doctor(self, call: Call, _: None) -> dict[str, Any]:
        return await self._node.doctor()

    def _view(self, view: View) -> SandboxView:
        record, info = view
        return SandboxView(
            id=record.id,
            state=info.state,
            image=record.image,
            created_at=record.created_at,
            expires_at=info.expires_at,
            data_url=self._data_url,
            access_token=record.token,
            metadata=record.metadata,
            name=record.name,
            limits=info.limits,
            network=record.network,
            workdir=info.workdir,
            user=info.user,
        )


def idempotency_key(call: Call) -> str | None:
    """Raises UsageError for a key of a kind that nobody could mean."""
    key = call.request.header(b"idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise UsageError("the idempotency key is not 1 to 255 characters long")
    return key


def wanted_of(body: CreateSandbox) -> Wanted:
    """Raises UsageError, naming the field."""
    for field, value in (("cpu", body.cpu), ("memory_mb", body.memory_mb), ("disk_mb", body.disk_mb),
                         ("pids", body.pids), ("inodes", body.inodes), ("shm_mb", body.shm_mb)):  # fmt: skip
        if value is not None and not value > 0:
            raise UsageError(f"{field} is {value}", hint="leave it out for no limit", details={"field": field})
    if not body.lease_s > 0:
        raise UsageError(
            f"lease_s is {body.lease_s}",
            hint="seconds, more than 0; every sandbox has a lease",
            details={"field": "lease_s"},
        )
    if body.network not in NETWORKS:
        raise UsageError(f"network is {body.network!r}", hint="none or all", details={"field": "network"})
    if not body.image:
        raise UsageError(
            "image is empty", hint="`host`, or an image of `sandmill image ls`", details={"field": "image"}
        )
    if body.name is not None and not 1 <= len(body.name) <= 255:
        raise UsageError("name is not 1 to 255 characters long", details={"field": "name"})
    return Wanted(
        image=body.image,
        env=body.env,
        workdir=body.workdir,
        user=body.user,
        network=body.network,
        limits=LimitSpec(
            cpu=body.cpu,
            memory_bytes=_bytes(body.memory_mb),
            pids=body.pids,
            disk_bytes=_bytes(body.disk_mb),
            inodes=body.inodes,
            shm_bytes=_bytes(body.shm_mb),
        ),
        lease=Lease(body.lease_s, body.renew_on_use),
        metadata=body.metadata,
        name=body.name,
        pull=body.pull,
    )


def _line(content: Any) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB

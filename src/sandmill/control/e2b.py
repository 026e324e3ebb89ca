"""E2B's dialect: the REST API that the E2B SDKs (2.45 to 2.63) speak. Translation only.

Where E2B promises what Sandmill can't do yet (pausing, egress rules, volumes, ...), the answer is 501 `not_implemented` with
the field's name: a sandbox that silently lacks it would be worse.
"""

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec

from sandmill.control.http import Answer
from sandmill.control.native import MIB, idempotency_key
from sandmill.control.node import Node
from sandmill.control.routes import Call, Query, Route
from sandmill.control.sandboxes import Sandboxes, View, Wanted
from sandmill.control.store import Record
from sandmill.errors import NodeError, SandmillError, UsageError
from sandmill.wire import ImageInfo, Lease, Usage

ENVD_VERSION: Final = "0.6.4"
"""The envd whose calls sandboxd serves: new enough for all that the SDKs ask for."""
BASE_TEMPLATE: Final = "base"
BASE_USER: Final = "user"
BASE_WORKDIR: Final = "/home/user"
CLIENT_ID: Final = "sandmill"
EVERYWHERE: Final = ("0.0.0.0/0", "::/0")

Seconds = Annotated[int, msgspec.Meta(ge=0, le=366 * 24 * 3600)]
Lifetime = Annotated[int, msgspec.Meta(ge=1, le=366 * 24 * 3600)]


class NewSandbox(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields that aren't here are ignored, as E2B does."""

    template_id: str = msgspec.field(name="templateID")
    timeout: Lifetime | None = None
    auto_pause: bool | None = None
    auto_resume: dict[str, Any] | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[dict[str, Any]] | None = None


class Sandbox(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID", default=CLIENT_ID)
    alias: str
    envd_version: str = ENVD_VERSION
    envd_access_token: str
    domain: str | None


class ListedSandbox(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID", default=CLIENT_ID)
    alias: str
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    state: str
    envd_version: str = ENVD_VERSION
    metadata: dict[str, str]


class Lifecycle(msgspec.Struct, frozen=True, rename="camel"):
    auto_resume: bool = False
    on_timeout: str = "kill"


class SandboxDetail(ListedSandbox, frozen=True, kw_only=True, rename="camel"):
    envd_access_token: str
    domain: str | None
    allow_internet_access: bool | None
    lifecycle: Lifecycle = Lifecycle()


class TimeoutRequest(msgspec.Struct, frozen=True):
    timeout: Seconds


class RefreshRequest(msgspec.Struct, frozen=True):
    duration: Seconds = 15


class ConnectRequest(msgspec.Struct, frozen=True):
    timeout: Lifetime = 300


class Metric(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int = 0
    disk_used: int
    disk_total: int


class SandboxesWithMetrics(msgspec.Struct, frozen=True):
    sandboxes: dict[str, Metric]


class Template(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    template_id: str = msgspec.field(name="templateID")
    build_id: str = msgspec.field(name="buildID")
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    public: bool = True
    aliases: list[str]
    names: list[str]
    created_at: datetime
    updated_at: datetime
    created_by: None = None
    last_spawned_at: datetime | None
    spawn_count: int = 0
    build_count: int = 1
    envd_version: str = ENVD_VERSION
    build_status: str = "ready"
    is_default: bool = False


class E2b:
    """Handlers of E2B's routes."""

    def __init__(self, sandboxes: Sandboxes, node: Node, domain: str | None) -> None:
        self._sandboxes = sandboxes
        self._node = node
        self._domain = domain
        self._cpu: dict[str, tuple[float, float]] = {}
        """Last sample of each sandbox whose metrics were asked for: time and CPU seconds."""
        self._cores = len(os.sched_getaffinity(0))
        self._memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB

    def routes(self) -> Sequence[Route]:
        one = "/sandboxes/{sandboxID}"
        create_errors = (400, 401, 404, 409, 422, 501, 503)
        filters = (
            Query("metadata", "URL-encoded pairs that the metadata must have, themselves a query string"),
            Query("state", "running, paused, or both with a comma"),
            Query("template", "only those of this template"),
            Query("startedAfter", "ISO time; only those started then or later"),
            Query("order", "asc or desc (default) by start"),
            Query("nextToken", "x-next-token of the page before"),
            Query("limit", "how many, up to 1000", "integer"),
        )
        span = (Query("start", "unix seconds", "integer"), Query("end", "unix seconds", "integer"))
        later = [
            ("POST", f"{one}/pause", "Pausing"),
            ("POST", f"{one}/resume", "Resuming"),
            ("POST", f"{one}/fork", "Forking"),
            ("POST", f"{one}/snapshots", "Snapshots"),
            ("PUT", f"{one}/network", "Changing the network of a running sandbox"),
        ]
        return (
            Route("POST", "/sandboxes", self.create_15, "Create (timeout 15 s by default)", "e2b", NewSandbox, Sandbox,
                  201, errors=create_errors),
            Route("POST", "/v2/sandboxes", self.create_300, "Create (timeout 300 s by default)", "e2b", NewSandbox,
                  Sandbox, 201, errors=create_errors),
            Route("GET", "/sandboxes", self.list_all, "All that run", "e2b", None, list[ListedSandbox],
                  query=filters[:1], errors=(400, 401)),
            Route("GET", "/v2/sandboxes", self.list_page, "A page of those that run", "e2b", None, list[ListedSandbox],
                  query=filters, errors=(400, 401)),
            Route("GET", "/sandboxes/metrics", self.many_metrics, "Metrics of many", "e2b", None, SandboxesWithMetrics,
                  query=(Query("sandbox_ids", "with commas between"),), errors=(400, 401)),
            Route("GET", one, self.get, "One sandbox", "e2b", None, SandboxDetail, errors=(401, 404)),
            Route("DELETE", one, self.kill, "End it", "e2b", status=204, errors=(401, 404)),
            Route("POST", f"{one}/timeout", self.timeout, "Set the end of its life", "e2b", TimeoutRequest, status=204,
                  errors=(400, 401, 404)),
            Route("POST", f"{one}/refreshes", self.refresh, "Extend its life", "e2b", RefreshRequest, status=204,
                  errors=(400, 401, 404)),
            Route("POST", f"{one}/connect", self.connect, "Connect; extends its life", "e2b", ConnectRequest, Sandbox,
                  errors=(400, 401, 404)),
            Route("POST", f"/v2{one}/connect", self.connect, "Connect; extends its life", "e2b", ConnectRequest, Sandbox,
                  errors=(400, 401, 404)),
            Route("GET", f"{one}/metrics", self.metrics, "Its metrics now", "e2b", None, list[Metric], query=span,
                  errors=(401, 404)),
            Route("GET", "/templates", self.templates, "Images, as templates", "e2b", None, list[Template]),
            *(Route(method, path, _later(what), f"{what}: not there yet", "e2b", errors=(501,))
              for method, path, what in later),
            Route("GET", "/health", self.health, "Liveness", "open", status=204),
        )  # fmt: skip

    async def health(self, call: Call, _: None) -> None:
        return None

    # Creates

    async def create_15(self, call: Call, body: NewSandbox) -> Answer:
        return await self._create(call, body, 15)

    async def create_300(self, call: Call, body: NewSandbox) -> Answer:
        return await self._create(call, body, 300)

    async def _create(self, call: Call, body: NewSandbox, default_timeout: int) -> Answer:
        view = await self._sandboxes.create(wanted_of(body, default_timeout), idempotency_key(call))
        one = view.record.id
        return Answer(
            201, msgspec.json.encode(self._sandbox(view.record)), undelivered=lambda: self._sandboxes.undelivered(one)
        )

    async def connect(self, call: Call, body: ConnectRequest) -> Sandbox:
        view = await self._sandboxes.extend(call.params["sandboxID"], float(body.timeout))
        return self._sandbox(view.record)

    def _sandbox(self, record: Record) -> Sandbox:
        return Sandbox(
            template_id=_template(record),
            sandbox_id=record.id,
            alias=_template(record),
            envd_access_token=record.token,
            domain=self._domain,
        )

    # What there is

    async def list_all(self, call: Call, _: None) -> list[ListedSandbox]:
        found: list[ListedSandbox] = []
        cursor = None
        while True:
            page = await self._sandboxes.page(_metadata(call), 1000, cursor)
            found += [ListedSandbox(**self._facts(view)) for view in page.views]
            cursor = page.cursor
            if cursor is None:
                return found

    async def list_page(self, call: Call, _: None) -> Answer:
        order = call.text("order") or "desc"
        if order not in ("asc", "desc"):
            raise UsageError(f"order={order!r} is neither asc nor desc")
        states = {state for name, value in call.query if name == "state" for state in value.split(",") if state}
        if not states <= {"running", "paused"}:
            raise UsageError(f"state={','.join(sorted(states))!r} is neither running nor paused")
        template = call.text("template")
        after = _time(call.text("startedAfter"))
        if states == {"paused"}:
            return Answer(200, b"[]")

        def wanted(record: Record) -> bool:
            return record.created_at >= after and template in (None, "", _template(record))

        page = await self._sandboxes.page(
            _metadata(call), call.integer("limit", 100, 1, 1000), call.text("nextToken"), order == "desc", wanted
        )
        listed = [ListedSandbox(**self._facts(view)) for view in page.views]
        headers = [("x-next-token", page.cursor)] if page.cursor is not None else []
        return Answer(200, msgspec.json.encode(listed), headers=headers)

    async def get(self, call: Call, _: None) -> SandboxDetail:
        view = await self._sandboxes.get(call.params["sandboxID"])
        return SandboxDetail(
            **self._facts(view),
            envd_access_token=view.record.token,
            domain=self._domain,
            allow_internet_access=view.record.internet_asked,
        )

    def _facts(self, view: View) -> dict[str, Any]:
        record, info = view
        limits = info.limits
        return {
            "template_id": _template(record),
            "sandbox_id": record.id,
            "alias": _template(record),
            "started_at": _iso(record.created_at),
            "end_at": _iso(info.expires_at),
            "cpu_count": self._cores if limits.cpu is None else math.ceil(limits.cpu),
            "memory_mb": self._memory_mb if limits.memory_bytes is None else limits.memory_bytes // MIB,
            "disk_size_mb": 0 if limits.disk_bytes is None else limits.disk_bytes // MIB,
            "state": "running",
            "metadata": record.metadata,
        }

    # Its life

    async def kill(self, call: Call, _: None) -> None:
        await self._sandboxes.kill(call.params["sandboxID"])

    async def timeout(self, call: Call, body: TimeoutRequest) -> None:
        """From now; 0 ends it with the next sweep. E2B's timeouts are not renewed by use."""
        await self._sandboxes.renew(call.params["sandboxID"], float(body.timeout) or 0.001, False)

    async def refresh(self, call: Call, body: RefreshRequest) -> None:
        await self._sandboxes.extend(call.params["sandboxID"], float(body.duration))

    # Metrics

    async def metrics(self, call: Call, _: None) -> list[Metric]:
        metric = await self._metric(call.params["sandboxID"])
        start, end = call.integer("start", 0, 0, 2**53), call.integer("end", 2**53, 0, 2**53)
        return [metric] if start <= metric.timestamp_unix <= max(end, start) else []

    async def many_metrics(self, call: Call, _: None) -> SandboxesWithMetrics:
        ids = [one for one in (call.text("sandbox_ids") or "").split(",") if one]
        if len(ids) > 100:
            raise UsageError(f"{len(ids)} sandboxes at once", hint="ask for 100 at most")
        found = {}
        for one in ids:
            try:
                found[one] = await self._metric(one)
            except SandmillError as error:
                if error.code not in ("sandbox_not_found", "sandbox_gone"):
                    raise
        return SandboxesWithMetrics(found)

    async def _metric(self, sandbox_id: str) -> Metric:
        usage = await self._sandboxes.usage(sandbox_id)
        view = await self._sandboxes.get(sandbox_id)
        facts = self._facts(view)
        at = usage.at or self._sandboxes.now()
        return Metric(
            timestamp=_iso(at),
            timestamp_unix=int(at),
            cpu_count=facts["cpu_count"],
            cpu_used_pct=self._cpu_pct(sandbox_id, usage, at, view.record.created_at),
            mem_used=usage.memory_bytes,
            mem_total=usage.memory_limit_bytes or facts["memory_mb"] * MIB,
            disk_used=usage.disk_bytes or 0,
            disk_total=usage.disk_limit_bytes or 0,
        )

    def _cpu_pct(self, sandbox_id: str, usage: Usage, at: float, created_at: float) -> float:
        """Of one core, since the last time that it was asked for (or since its creation)."""
        before, used = self._cpu.get(sandbox_id, (created_at, 0.0))
        if at - before < 0.5:
            before, used = created_at, 0.0
        else:
            self._cpu[sandbox_id] = (at, usage.cpu_s)
            if len(self._cpu) > 10_000:
                self._cpu.pop(next(iter(self._cpu)))
        return round(max(0.0, 100.0 * (usage.cpu_s - used) / max(at - before, 0.001)), 2)

    # Templates

    async def templates(self, call: Call, _: None) -> list[Template]:
        images = await self._node.images()
        return [self._template_of(image) for image in images]

    def _template_of(self, image: ImageInfo) -> Template:
        names = [BASE_TEMPLATE if name == "host" else name for name in image.names]
        return Template(
            template_id=names[0] if names else image.id,
            build_id=image.id,
            cpu_count=self._cores,
            memory_mb=self._memory_mb,
            disk_size_mb=image.size_bytes // MIB,
            aliases=names,
            names=names,
            created_at=_iso(image.created_at),
            updated_at=_iso(image.created_at),
            last_spawned_at=_iso(image.last_used_at) if image.last_used_at else None,
            is_default=BASE_TEMPLATE in names,
        )


def wanted_of(body: NewSandbox, default_timeout: int) -> Wanted:
    """Raises UsageError naming the field, NodeError (501) for what isn't there yet."""
    if body.auto_pause:
        raise _not_yet("autoPause", "a sandbox is ended at its timeout; leave autoPause away")
    if body.auto_resume is not None and body.auto_resume.get("enabled"):
        raise _not_yet("autoResume", "there is no pausing, hence nothing to resume")
    for field, value in (("mcp", body.mcp), ("iam", body.iam), ("volumeMounts", body.volume_mounts)):
        if value:
            raise _not_yet(field, "leave it away")
    base = body.template_id == BASE_TEMPLATE
    return Wanted(
        image="host" if base else body.template_id,
        env=body.env_vars or {},
        workdir=BASE_WORKDIR if base else None,
        user=BASE_USER if base else None,
        network=_network(body),
        lease=Lease(float(default_timeout if body.timeout is None else body.timeout), False),
        metadata=body.metadata or {},
        template=body.template_id,
        pull="never",  # E2B's templates are no images of a registry
        internet_asked=body.allow_internet_access,
    )


def _network(body: NewSandbox) -> str:
    """`all`, E2B's default, or `none`. Rules in between are not there yet."""
    rules = {name: value for name, value in (body.network or {}).items() if value not in (None, [], {})}
    rules.pop("allowPublicTraffic", None)  # ports are reached with the sandbox's token either way
    deny = rules.pop("denyOut", None)
    for field in rules:
        raise _not_yet(f"network.{field}", "allow_internet_access true or false is what there is")
    if deny is not None:
        if not (isinstance(deny, list) and any(one in EVERYWHERE for one in deny)):
            raise _not_yet("network.denyOut", "all (0.0.0.0/0) or nothing is what there is")
        return "none"
    return "none" if body.allow_internet_access is False else "all"


def _not_yet(field: str, hint: str) -> NodeError:
    return NodeError(
        f"{field} is not there yet in Sandmill", code="not_implemented", hint=hint, status=501, details={"field": field}
    )


def _later(what: str) -> Any:
    async def answer(call: Call, body: None) -> None:
        raise NodeError(f"{what} is not there yet in Sandmill", code="not_implemented", status=501)

    return answer


def _template(record: Record) -> str:
    return record.template or (BASE_TEMPLATE if record.image == "host" else record.image)


def _metadata(call: Call) -> dict[str, str]:
    """The filter. The SDKs encode each name and value, then the pairs as a query string, then the URL."""
    text = call.text("metadata")
    if not text:
        return {}
    return {unquote(name): unquote(value) for name, value in parse_qsl(text, keep_blank_values=True)}


def _time(text: str | None) -> float:
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError as error:
        raise UsageError(f"startedAfter={text[:64]!r} is no ISO time") from error


def _iso(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)

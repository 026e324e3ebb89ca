"""Sandboxes and images, between serve, noded and clients (protocols.md sections 2 and 6)."""

from typing import Any, Literal

import msgspec


class LimitSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a spec asks of noded. None: no limit (or noded's default)."""

    cpu: float | None = None
    """Cores."""
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    shm_bytes: int | None = None


class Lease(msgspec.Struct, frozen=True):
    """How long a sandbox lives without renewal, and whether its use renews it."""

    ttl_s: float
    renew_on_use: bool = True


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A create, as noded takes it."""

    id: str
    image: str
    token: str
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    network: str = "none"
    limits: LimitSpec = LimitSpec()
    lease: Lease = Lease(300.0)
    plain_disk: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits as enforced, and by what."""

    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    shm_bytes: int | None = None
    enforced_by: dict[str, str] = {}


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live sandbox, as noded sees it. Times are unix seconds."""

    id: str
    state: str
    image: str
    created_at: float
    started_at: float | None = None
    expires_at: float
    pid: int | None = None
    limits: Limits = Limits()
    network: dict[str, Any] = {}
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None


class SandboxEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why a sandbox is no more."""

    id: str
    cause: str
    """killed, lease_expired, oom, crashed, node_restarted or committed."""
    message: str = ""
    ended_at: float = 0.0
    exit_status: int | None = None
    memory_peak_bytes: int | None = None


class CreateSandbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sandboxes`."""

    image: str = "host"
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    network: str = "none"
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids: int | None = None
    inodes: int | None = None
    shm_mb: int | None = None
    lease_s: float = 300.0
    renew_on_use: bool = True
    metadata: dict[str, str] = {}
    name: str | None = None
    pull: Literal["missing", "always", "never"] = "missing"
    """When to ask the image's registry: if it is not here, always, or never."""


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox, as clients see it."""

    id: str
    state: str
    image: str
    created_at: float
    expires_at: float
    data_url: str
    access_token: str
    metadata: dict[str, str] = {}
    name: str | None = None
    limits: Limits = Limits()
    network: str = "none"
    workdir: str | None = None
    user: str | None = None

"""Types that cross a process boundary; the contract in prose is docs/reference/protocols.md."""

from sandmill.wire.data import Exec, ProcInfo, Result, Usage
from sandmill.wire.images import Collected, Collection, ImageConfig, ImageInfo, PulledLayer, Pulling, RemovedImage
from sandmill.wire.sandboxes import (
    CreateSandbox,
    Lease,
    Limits,
    LimitSpec,
    SandboxEnd,
    SandboxInfo,
    SandboxSpec,
    SandboxView,
)

__all__ = [
    "Collected",
    "Collection",
    "CreateSandbox",
    "Exec",
    "ImageConfig",
    "ImageInfo",
    "Lease",
    "LimitSpec",
    "Limits",
    "ProcInfo",
    "PulledLayer",
    "Pulling",
    "RemovedImage",
    "Result",
    "SandboxEnd",
    "SandboxInfo",
    "SandboxSpec",
    "SandboxView",
    "Usage",
]

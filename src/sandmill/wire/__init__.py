"""Types that cross a process boundary; the contract in prose is docs/reference/protocols.md."""

from sandmill.wire.data import Exec, ProcInfo, Result, Usage
from sandmill.wire.sandboxes import (
    CreateSandbox,
    ImageConfig,
    ImageInfo,
    Lease,
    Limits,
    LimitSpec,
    SandboxEnd,
    SandboxInfo,
    SandboxSpec,
    SandboxView,
)

__all__ = [
    "CreateSandbox",
    "Exec",
    "ImageConfig",
    "ImageInfo",
    "Lease",
    "LimitSpec",
    "Limits",
    "ProcInfo",
    "Result",
    "SandboxEnd",
    "SandboxInfo",
    "SandboxSpec",
    "SandboxView",
    "Usage",
]

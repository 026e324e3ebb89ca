"""Sandmill: the execution platform for agentic reinforcement learning.

```python
from sandmill import Sandbox

with Sandbox() as box:
    print(box.run("uname -a").text)
```
"""

from typing import TYPE_CHECKING

from sandmill.errors import (
    AuthError,
    CommandError,
    CommandTimeoutError,
    ConflictError,
    ImageError,
    NodeError,
    NotFoundError,
    PreparationError,
    SandboxGoneError,
    SandmillError,
    ServerError,
    TransportError,
    UsageError,
)
from sandmill.sdk.filecalls import Entry
from sandmill.sdk.process import Output, Process, Session
from sandmill.sdk.sandbox import Sandbox, prepare
from sandmill.wire import ImageInfo, Limits, ProcInfo, Result, SandboxView, Usage

if TYPE_CHECKING:
    from sandmill.sdk.asynchronous import AsyncSandbox

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - grouped by meaning
    # sandboxes
    "AsyncSandbox",
    "Entry",
    "Output",
    "Process",
    "Sandbox",
    "Session",
    "prepare",
    # what calls give back
    "ImageInfo",
    "Limits",
    "ProcInfo",
    "Result",
    "SandboxView",
    "Usage",
    # errors
    "AuthError",
    "CommandError",
    "CommandTimeoutError",
    "ConflictError",
    "ImageError",
    "NodeError",
    "NotFoundError",
    "PreparationError",
    "SandboxGoneError",
    "SandmillError",
    "ServerError",
    "TransportError",
    "UsageError",
]


def __getattr__(name: str) -> object:
    # asyncio costs a third of the import budget: loaded with the first use of the asynchronous client.
    if name == "AsyncSandbox":
        from sandmill.sdk.asynchronous import AsyncSandbox

        return AsyncSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

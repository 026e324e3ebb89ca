"""Sandmill: the execution platform for agentic reinforcement learning.

```python
from sandmill import Sandbox

with Sandbox() as box:
    print(box.run("uname -a").text)
```
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from sandmill.sdk.asynchronous import AsyncSandbox
    from sandmill.sdk.filecalls import Entry
    from sandmill.sdk.process import Output, Process, Session
    from sandmill.sdk.sandbox import Sandbox, prepare
    from sandmill.wire import ImageInfo, Limits, ProcInfo, Result, SandboxView, Usage

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


_HOMES = {
    "AsyncSandbox": "sandmill.sdk.asynchronous",
    "Entry": "sandmill.sdk.filecalls",
    "Output": "sandmill.sdk.process",
    "Process": "sandmill.sdk.process",
    "Session": "sandmill.sdk.process",
    "Sandbox": "sandmill.sdk.sandbox",
    "prepare": "sandmill.sdk.sandbox",
    **dict.fromkeys(("ImageInfo", "Limits", "ProcInfo", "Result", "SandboxView", "Usage"), "sandmill.wire"),
}
"""Where a public name lives; errors are the rest. Each is loaded with its first use."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES.get(name, "sandmill.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

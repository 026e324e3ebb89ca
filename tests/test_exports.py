"""The package's public names change on purpose: this list changes in the same commit."""

import sandmill

PUBLIC = [
    "AsyncSandbox",
    "AuthError",
    "CommandError",
    "CommandTimeoutError",
    "ConflictError",
    "Entry",
    "ImageError",
    "ImageInfo",
    "Limits",
    "NodeError",
    "NotFoundError",
    "Output",
    "PreparationError",
    "ProcInfo",
    "Process",
    "Result",
    "Sandbox",
    "SandboxGoneError",
    "SandboxView",
    "SandmillError",
    "ServerError",
    "Session",
    "TransportError",
    "Usage",
    "UsageError",
    "prepare",
]


def test_public_names() -> None:
    assert sorted(sandmill.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(sandmill, name).__doc__, f"{name} has no docstring"

"""What a backend is: two small protocols, lifecycle apart from a sandbox's own I/O.

A backend makes and ends sandboxes; the control plane decides about them. Implementations: `node` (noded on this host) and
`fake` (in memory, public, for users' tests). Both pass `sandmill.backends.conformance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sandmill.wire import (
    Collected,
    Collection,
    Exec,
    ImageInfo,
    Pulling,
    Result,
    SandboxEnd,
    SandboxInfo,
    SandboxSpec,
    Usage,
)


@dataclass(frozen=True)
class Inventory:
    """What a backend has: sandboxes that live, and ends that it still remembers."""

    live: Sequence[SandboxInfo]
    ended: Sequence[SandboxEnd]


@dataclass(frozen=True)
class Events:
    """Ends since a point; `next` is the point to ask from next."""

    ended: Sequence[SandboxEnd]
    next: int


@runtime_checkable
class Backend(Protocol):
    """Lifecycle. Every call raises NodeError (code `node_unavailable`, retryable) while the backend can't be reached.

    Cancelling a call leaves the work to its end or undone, never half; a create that was cancelled is undone by the caller
    with `destroy`, which is safe at any time.
    """

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Makes a sandbox; the same id again gives the existing one. Raises NotFoundError (image), NodeError, UsageError."""
        ...

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """Raises NotFoundError, SandboxGoneError with the SandboxEnd as details."""
        ...

    async def inventory(self) -> Inventory:
        """All sandboxes."""
        ...

    async def destroy(self, sandbox_id: str, cause: str = "killed") -> None:
        """Ends one; nothing of it is left on return. Raises NotFoundError, SandboxGoneError."""
        ...

    async def renew(self, leases: dict[str, float]) -> list[str]:
        """Sets the ends of leases, in seconds from now; gives the ids that are gone."""
        ...

    async def set_lease(self, sandbox_id: str, ttl_s: float, renew_on_use: bool | None = None) -> None: ...

    async def usage(self, sandbox_id: str) -> Usage: ...

    async def commit(self, sandbox_id: str, name: str | None, config: dict[str, Any] | None = None) -> ImageInfo:
        """Ends a sandbox and keeps its changes as an image."""
        ...

    async def events(self, after: int, wait_s: float) -> Events:
        """Ends after a point; waits up to `wait_s` for one."""
        ...

    async def images(self) -> list[ImageInfo]: ...

    async def image(self, name: str) -> ImageInfo: ...

    async def import_image(self, path: str, name: str | None, kind: str = "auto") -> ImageInfo: ...

    async def pull_image(
        self, name: str, *, newest: bool = False, credentials: dict[str, str] | None = None
    ) -> ImageInfo:
        """Fetches an image from its registry unless it is here (`newest`: asks the registry even then), once for all who ask.

        `credentials`: `{"username", "password"}` or `{"identity_token"}`; None: what `docker login` left on the node. Raises
        NotFoundError, ImageError (auth, rate limit, registry unavailable), UsageError (no name in a registry).
        """
        ...

    async def pulls(self) -> list[Pulling]:
        """The pulls that go on now."""
        ...

    async def collect_images(self, collection: Collection) -> Collected:
        """Removes unused images."""
        ...

    async def remove_image(self, name: str) -> None: ...

    async def close(self) -> None:
        """Lets go of it; sandboxes live on."""
        ...


@runtime_checkable
class SandboxIO(Protocol):
    """A sandbox's own calls, as far as the control plane and the conformance suite need them.

    The SDK's clients are the full interface; this is what a backend without a network path (the fake) gives too. All raise
    SandboxGoneError once the sandbox has ended.
    """

    async def run(self, command: Exec) -> Result:
        """Runs a command to its end. A timeout is a result. Never runs it twice. Raises UsageError (program, cwd, user)."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: str | None = None) -> None:
        """A whole file or none; an existing one keeps its mode and owner."""
        ...

    async def read(self, path: str) -> bytes:
        """Raises NotFoundError; UsageError for what isn't a file."""
        ...

    async def names(self, path: str) -> list[str]:
        """Names in a directory, sorted. Raises NotFoundError."""
        ...

    async def remove(self, path: str) -> None:
        """A file, or a directory with all in it. Raises NotFoundError."""
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...

"""What serve asks of the machine beside sandboxes: a backend that can also say how it and its machine are."""

from typing import Any, Protocol

from sandmill.backends.base import Backend


class Node(Backend, Protocol):
    """A backend on one machine. Raises what `Backend` raises."""

    async def health(self) -> dict[str, Any]: ...

    async def doctor(self) -> dict[str, Any]: ...

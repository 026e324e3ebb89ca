"""Errors: one root, categories named by the boundary that was crossed, a stable code on the wire.

- *Vocabulary*: the classes below. Each carries `code` (stable, snake_case), `message`, `hint` (what to do), `retryable`
  (whether the same call can work later) and `details`.
- *Classification*: `from_wire` rebuilds an error from its shape on the wire, by a fixed table from code to class; an
  unknown code becomes the class of its HTTP status. Never by importing a name that the wire gave.
- *Outcomes that are not errors*: a command that failed, a limit that was reached (a timeout, an out-of-memory kill).
  Those are results (`RunResult.reason`). They become errors only where the caller asked with `check=True`.
"""

from typing import Any


class SandmillError(Exception):
    """Root of everything that Sandmill raises on purpose."""

    default_code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        retryable: bool = False,
        details: dict[str, Any] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.retryable = retryable
        self.details = details or {}
        self.status = status

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            "code": self.code,
            "hint": self.hint,
            "retryable": self.retryable,
            "details": self.details,
            "status": self.status,
        }
        return (_rebuild, (type(self), self.message, state))

    def as_wire(self) -> dict[str, Any]:
        """The shape on the wire."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "details": self.details,
        }


def _rebuild(kind: type[SandmillError], message: str, state: dict[str, Any]) -> SandmillError:
    return kind(message, **state)


class UsageError(SandmillError):
    """The caller asked for something that can't be: a bad argument, a missing directory or program, a bad configuration."""

    default_code = "invalid_argument"


class AuthError(SandmillError):
    """The API key or the sandbox's access token is missing or wrong."""

    default_code = "unauthorized"


class NotFoundError(SandmillError):
    """A sandbox, process, session, file or image that isn't there (and isn't known to have been)."""

    default_code = "not_found"


class ConflictError(SandmillError):
    """The state forbids it: an image in use, an idempotency key used for something else."""

    default_code = "conflict"


class SandboxGoneError(SandmillError):
    """The sandbox has ended. `cause` says why: killed, lease_expired, oom, crashed, node_restarted, committed."""

    default_code = "sandbox_gone"

    @property
    def cause(self) -> str | None:
        cause = self.details.get("cause")
        return cause if isinstance(cause, str) else None


class NodeError(SandmillError):
    """The node could not do its part: a kernel limit reached, a step of a create refused, noded away."""

    default_code = "node_error"


class ImageError(SandmillError):
    """An image can't be imported or pulled, or isn't what it says."""

    default_code = "image_invalid"


class PreparationError(SandmillError):
    """A step of preparing an environment failed; `details` has the step and its output."""

    default_code = "preparation_failed"


class TransportError(SandmillError):
    """The connection to a server broke, or no answer came in time. The sandbox may well live."""

    default_code = "connection_failed"


class ServerError(SandmillError):
    """A bug of ours, said by a server."""

    default_code = "internal"


class CommandError(SandmillError):
    """A command did not succeed, and the caller asked for that to be an error (`check=True`). `result` has all of it."""

    default_code = "command_failed"

    def __init__(self, message: str, *, result: Any = None, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"code": self.code, "hint": self.hint, "details": self.details, "result": self.result}
        return (_rebuild, (type(self), self.message, state))


class CommandTimeoutError(CommandError):
    """A command ran into its `timeout_s`, and the caller asked for that to be an error."""

    default_code = "command_timeout"


BY_CODE: dict[str, type[SandmillError]] = {
    "unauthorized": AuthError,
    "sandbox_not_found": NotFoundError,
    "sandbox_gone": SandboxGoneError,
    "image_not_found": NotFoundError,
    "image_in_use": ConflictError,
    "image_invalid": ImageError,
    "image_auth": ImageError,
    "image_rate_limited": ImageError,
    "registry_unavailable": ImageError,
    "registry_protocol": ImageError,
    "idempotency_conflict": ConflictError,
    "preparation_failed": PreparationError,
    "node_exhausted": NodeError,
    "node_unavailable": NodeError,
    "create_failed": NodeError,
    "disk_failed": NodeError,
    "limit_unsupported": NodeError,
    "network_unavailable": NodeError,
    "too_many_starting": NodeError,
    "connection_failed": TransportError,
    "internal": ServerError,
}
"""Codes whose class the HTTP status alone does not give."""

BY_STATUS: dict[int, type[SandmillError]] = {
    400: UsageError,
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    405: UsageError,
    408: TransportError,
    409: ConflictError,
    410: SandboxGoneError,
    413: UsageError,
    422: UsageError,
    429: NodeError,
    500: ServerError,
    501: NodeError,
    502: TransportError,
    503: NodeError,
    504: TransportError,
}


def from_wire(shape: dict[str, Any], status: int) -> SandmillError:
    """Rebuilds an error from its shape on the wire; an unknown code becomes the class of its HTTP status."""
    code = shape.get("error_code") or shape.get("code")
    code = code if isinstance(code, str) else f"http_{status}"
    kind = BY_CODE.get(code) or BY_STATUS.get(status) or (UsageError if 400 <= status < 500 else ServerError)
    details = shape.get("details")
    return kind(
        str(shape.get("message") or f"HTTP {status}"),
        code=code,
        hint=shape.get("hint"),
        retryable=bool(shape.get("retryable")),
        details=details if isinstance(details, dict) else {},
        status=status,
    )

"""Errors as answers, in the dialect of the route that was asked."""

import msgspec

from sandmill.control.http import Answer
from sandmill.control.routes import Dialect
from sandmill.errors import (
    AuthError,
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

STATUS: tuple[tuple[type[SandmillError], int], ...] = (
    (UsageError, 400),
    (AuthError, 401),
    (NotFoundError, 404),
    (ConflictError, 409),
    (SandboxGoneError, 410),
    (PreparationError, 422),
    (ImageError, 422),
    (NodeError, 503),
    (TransportError, 503),
    (ServerError, 500),
)

STATUS_OF_CODE = {
    "not_implemented": 501,
    "limit_unsupported": 422,
    "network_unavailable": 422,
    "method_not_allowed": 405,
}
"""Codes whose class alone does not give the status."""


def status_of(error: SandmillError) -> int:
    if error.code in STATUS_OF_CODE:
        return STATUS_OF_CODE[error.code]
    if error.status is not None and 400 <= error.status < 600:
        return error.status
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def answer(error: SandmillError, dialect: Dialect) -> Answer:
    """An error's answer. E2B's clients read `code` as the status, and know no 410: what has ended isn't there."""
    status = status_of(error)
    shape = error.as_wire()
    if dialect == "e2b":
        status = 404 if status == 410 else status
        shape = {**shape, "code": status, "error_code": error.code}
    headers = []
    if status in (429, 500, 502, 503, 504):
        headers.append(("Should-Retry", "true" if error.retryable else "false"))
        if error.retryable:
            headers.append(("Retry-After", "1"))
    if isinstance(error, AuthError) and status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    return Answer(status, msgspec.json.encode(shape), headers=headers)

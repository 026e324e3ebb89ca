"""Errors of an attempt as data. An attempt that could not be carried out or graded has no reward, never the reward 0.

- `infrastructure`: the sandbox, node or connection failed. Tried again in a fresh sandbox, and by the next run.
- `preparation`: the environment could not be prepared. The next run tries again.
- `limit`: the sandbox ran out of memory as a whole. It would again: final.
- `grader`: tests/test.sh gave no reward that can be read. Final.
- `task`: the task can't be run this way (no solution, no such user or program). Final for this content.
- `internal`: a bug of ours. The next run tries again.
"""

from dataclasses import dataclass

from sandmill.errors import (
    ImageError,
    NodeError,
    PreparationError,
    SandboxGoneError,
    SandmillError,
    ServerError,
    TransportError,
)
from sandmill.rollouts.records import Failure

FINAL = {"limit", "grader", "task"}


class GraderError(SandmillError):
    """The verifier gave no reward that can be read; `code` says what was wrong."""

    default_code = "reward_missing"


@dataclass(frozen=True)
class Verdict:
    """What an error means for its attempt."""

    failure: Failure
    try_again: bool
    """Whether the same attempt can be carried out again at once, from the start, in a fresh sandbox."""


def classify(error: Exception) -> Verdict:
    """Sorts an error of an attempt."""
    if isinstance(error, GraderError):
        return _verdict("grader", error, False)
    if isinstance(error, SandboxGoneError):
        if error.cause == "oom":
            return _verdict("limit", error, False)
        return _verdict("infrastructure", error, True)
    if isinstance(error, (PreparationError, ImageError)):
        return _verdict("preparation", error, error.retryable)
    if isinstance(error, (NodeError, TransportError, ServerError)):
        # A limit that this node can't give stays so; anything else may pass.
        return _verdict("infrastructure", error, error.code != "limit_unsupported")
    if isinstance(error, SandmillError):
        return _verdict("task", error, False)
    failure = Failure(type="internal", code=type(error).__name__, message=str(error) or repr(error), retryable=False)
    return Verdict(failure, False)


def _verdict(kind: str, error: SandmillError, try_again: bool) -> Verdict:
    cause = error.details.get("cause")
    message = str(error)
    output = error.details.get("output")
    if isinstance(output, str) and output.strip():
        message = f"{message}\n{output.strip()[-2000:]}"
    return Verdict(
        Failure(
            type=kind,
            code=error.code,
            message=message,
            retryable=try_again,
            cause=cause if isinstance(cause, str) else None,
        ),
        try_again,
    )

"""How results are printed: tables for people, JSON for programs."""

import base64
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sandmill.wire import Result


def print_json(value: object) -> None:
    print(json.dumps(msgspec.to_builtins(value), indent=2))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last is never padded."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def span(seconds: float) -> str:
    """A time span for a person: 12s, 5m, 3h, 2d."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def since(at: float) -> str:
    return span(time.time() - at)


def until(at: float) -> str:
    return span(at - time.time())


def size(count: int) -> str:
    """A number of bytes for a person."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def result_as_json(result: Result) -> dict[str, Any]:
    """A result; output that isn't UTF-8 is there as base64, too."""
    shape: dict[str, Any] = msgspec.to_builtins(result, builtin_types=(bytes,))
    for stream in ("stdout", "stderr"):
        data: bytes = shape[stream]
        shape[stream] = data.decode(errors="replace")
        try:
            data.decode()
        except UnicodeDecodeError:
            shape[f"{stream}_base64"] = base64.b64encode(data).decode()
    del shape["session_alive"]
    return shape


def note(line: str) -> None:
    """A word to the person, beside the command's output."""
    print(f"sandmill: {line}", file=sys.stderr, flush=True)

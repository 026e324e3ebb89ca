"""`sandmill serve --embedded`: what the SDK starts. Its options come in pairs, from a program and not from a person."""

import sys
from pathlib import Path

from sandmill.errors import SandmillError


def serve_embedded(words: list[str]) -> int:
    """Serves until the parent ends; the exit code."""
    from sandmill.control.serve import Options, run

    given = dict(zip(words[::2], words[1::2], strict=False))
    try:
        options = Options(
            state_dir=Path(given["--state-dir"]),
            listen=given["--listen"],
            data_listen=given["--data-listen"],
            embedded=True,
            parent_pid=int(given["--parent-pid"]),
        )
    except (KeyError, ValueError) as error:
        print(f"error: serve --embedded is for the SDK; it lacks {error}", file=sys.stderr)
        return 2
    try:
        run(options)
    except SandmillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0

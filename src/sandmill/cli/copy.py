"""`sandmill cp`."""

import os
import re
import sys
from contextlib import closing
from pathlib import Path, PurePosixPath

import click

from sandmill.cli.client import need_server
from sandmill.cli.run import connect
from sandmill.errors import NotFoundError, UsageError
from sandmill.sdk import Sandbox

REMOTE = re.compile(r"(?P<sandbox>[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<path>.*)", re.DOTALL)


@click.command("cp")
@click.argument("source")
@click.argument("target")
@click.option("--user", "-u", help="Owner of what is copied in (default: the sandbox's user).")
def cp_command(source: str, target: str, user: str | None) -> None:
    """Copy a file or folder into a sandbox or out of it. One side is SANDBOX:PATH; - is stdin or stdout.

    A folder copied to a folder that exists lands inside it; FOLDER/. stands for its content. Types, modes and links stay.

    \b
    Examples:
      sandmill cp ./repo $box:/app/repo
      sandmill cp $box:/tmp/report.html .
      sandmill cp $box:/var/log/app.log - | less
      sandmill cp ./site/. builder:/srv
    """
    inside, outside = _remote(source), _remote(target)
    if (inside is None) == (outside is None):
        raise UsageError(
            "exactly one side is in a sandbox", hint="sandmill cp ./file SANDBOX:/path, or the other way round"
        )
    name, path = inside or outside or ("", "")
    if not path:
        raise UsageError(f"{name}: has no path", hint=f"{name}:/path")
    with closing(connect(need_server(), name)) as box:
        if outside is not None:
            _upload(box, source, path, user)
        else:
            _download(box, path, target)


def _remote(text: str) -> tuple[str, str] | None:
    """SANDBOX and PATH; None for a local path (also ./a:b and /a:b)."""
    found = REMOTE.fullmatch(text)
    return None if found is None or os.path.lexists(text) else (found["sandbox"], found["path"])


def _upload(box: Sandbox, source: str, path: str, user: str | None) -> None:
    if source == "-":
        box.files.write(path, sys.stdin.buffer, user=user)
        return
    local = Path(source)
    if not os.path.lexists(local):
        raise UsageError(f"there is no {source}")
    content_only = source.endswith(("/.", os.sep + ".")) or source == "."
    if not content_only and (path.endswith("/") or _is_directory(box, path)):
        path = str(PurePosixPath(path) / local.resolve().name)
    box.files.upload(local, path, user=user)


def _download(box: Sandbox, path: str, target: str) -> None:
    if target == "-":
        with box.files.stream(path) as parts:
            for part in parts:
                sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        return
    local = Path(target)
    if not path.endswith("/.") and (target.endswith("/") or local.is_dir()):
        if target.endswith("/"):
            local.mkdir(parents=True, exist_ok=True)
        local = local / (PurePosixPath(path).name or "root")
    elif not local.parent.is_dir():
        raise UsageError(f"there is no directory {local.parent}")
    try:
        box.files.download(path.removesuffix("/.") or "/", local)
    except BaseException:
        if local.is_file():
            local.unlink()  # half a file is worse than none
        raise


def _is_directory(box: Sandbox, path: str) -> bool:
    try:
        return box.files.stat(path, follow=True).is_dir
    except NotFoundError:
        return False

"""serve's files in the state directory: its lock, the API key, and the note that says where it listens."""

import fcntl
import json
import os
import re
import secrets
import time
from pathlib import Path

from sandmill.errors import ConflictError, UsageError

KEY_FORM = re.compile(r"e2b_[0-9a-f]{40}")


class StateDir:
    """A state directory that belongs to this process alone, until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @staticmethod
    def claim(path: Path) -> "StateDir":
        """Makes what is missing and takes the lock.

        Raises ConflictError if another server runs on it, UsageError if the directory can't be made or written.
        """
        path = path.absolute()
        try:
            # Others may pass through but not look: a sandbox's mapped root must reach the image layers.
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
            path.chmod(0o711)
            lock = os.open(path / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"the state directory {path} can't be used: {error.strerror}", hint="give another with --state-dir DIR"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConflictError(
                f"another server runs on {path}{_who(path)}",
                code="state_dir_in_use",
                hint="use that one, stop it, or give another directory with --state-dir DIR",
            ) from error
        return StateDir(path, lock)

    def api_key(self) -> str:
        """The key: SANDMILL_API_KEY, else the one kept here, made on first use. Raises UsageError for one of the wrong form."""
        file = self.path / "api-key"
        wanted = os.environ.get("SANDMILL_API_KEY", "").strip()
        kept = file.read_text().strip() if file.exists() else ""
        key = wanted or kept or f"e2b_{secrets.token_hex(20)}"
        if not KEY_FORM.fullmatch(key):
            where = "SANDMILL_API_KEY" if wanted else str(file)
            raise UsageError(
                f"the API key in {where} is not of the form that clients accept",
                code="api_key_invalid",
                hint="e2b_ and 40 hexadecimal digits; unset it and one is made",
            )
        if key != kept:
            write_whole(file, key + "\n", 0o600)
        return key

    def announce(self, api_url: str, data_url: str) -> None:
        """Tells clients on this machine where we are; `release` takes it back."""
        note = {"pid": os.getpid(), "api_url": api_url, "data_url": data_url, "started_at": time.time()}
        write_whole(self.path / "serve.json", json.dumps(note) + "\n", 0o644)

    def release(self) -> None:
        """Takes back what `announce` said and gives the lock away. Idempotent."""
        if self._lock >= 0:
            (self.path / "serve.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def write_whole(path: Path, text: str, mode: int) -> None:
    """Writes a file that is whole or as it was, with `mode` from its first moment on."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def _who(path: Path) -> str:
    try:
        told = json.loads((path / "serve.json").read_text())
        return f" (process {int(told['pid'])}, {told['api_url']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""

"""Which server: arguments, the environment, a server that runs beside us, or an embedded one."""

import json
import os
from pathlib import Path

import msgspec

from sandmill.errors import UsageError


class Server(msgspec.Struct, frozen=True):
    """A control API and the key for it."""

    api_url: str
    api_key: str


def default_state_dir() -> Path:
    """Where `sandmill serve` keeps its state unless told otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/sandmill")
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state) / "sandmill" if state else Path.home() / ".local" / "state" / "sandmill"


def configured(api_url: str | None = None, api_key: str | None = None) -> Server | None:
    """The server that the arguments or SANDMILL_API_URL and SANDMILL_API_KEY name; None if nothing names one.

    Raises UsageError when an address is given and its key is nowhere to be found.
    """
    url = api_url or os.environ.get("SANDMILL_API_URL")
    if not url:
        return None
    key = api_key or os.environ.get("SANDMILL_API_KEY")
    if not key:
        beside = running_beside()
        if beside is not None and beside.api_url == url.rstrip("/"):
            return beside
        raise UsageError(
            f"no API key for {url}", hint="set SANDMILL_API_KEY; the server says where it keeps it when it starts"
        )
    return Server(url.rstrip("/"), key)


def running_beside(state_dir: Path | None = None) -> Server | None:
    """A server that runs on this machine with the (default) state directory, if we may read its key."""
    folder = state_dir or default_state_dir()
    try:
        told = json.loads((folder / "serve.json").read_text())
        os.kill(int(told["pid"]), 0)
        return Server(str(told["api_url"]), (folder / "api-key").read_text().strip())
    except (OSError, ValueError, KeyError, TypeError):
        return None

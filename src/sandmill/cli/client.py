"""Which server a command talks to, and which sandbox it means."""

import os
import re
import socket

from sandmill.errors import NotFoundError, TransportError, UsageError
from sandmill.sdk.configuration import Server, configured, running_beside
from sandmill.sdk.connection import Endpoint
from sandmill.sdk.control import Control, control_of
from sandmill.wire import SandboxView

CONNECT_S = 5.0
SANDBOX_ID = re.compile(r"i[a-z0-9]{19}")


def find_server() -> Server | None:
    """The configured server, else the one that runs on this machine with the default state directory.

    Raises TransportError at once if nothing answers there: a person should not wait for a server that may come back.
    """
    server = configured() or running_beside()
    if server is not None:
        endpoint = Endpoint.parse(server.api_url)
        try:
            socket.create_connection((endpoint.host, endpoint.port), CONNECT_S).close()
        except OSError as error:
            raise TransportError(
                f"no server answers at {server.api_url}: {error.strerror or error}",
                hint="`sandmill serve` starts one here; SANDMILL_API_URL names the one to use",
                retryable=True,
            ) from error
    return server


def need_server() -> Server:
    """As `find_server`; raises UsageError if there is none."""
    server = find_server()
    if server is None:
        raise UsageError(
            "no server is known",
            code="no_server",
            hint="`sandmill serve` starts one here; SANDMILL_API_URL and SANDMILL_API_KEY name another",
        )
    return server


def need_control() -> Control:
    return control_of(need_server())


def server_or_embedded() -> Server:
    """As `find_server`; if there is none, a server of this process, which ends with it."""
    server = find_server()
    if server is None:
        from sandmill.sdk.embedded import embedded_server

        server = embedded_server()
    return server


def point_here() -> None:
    """Points clients of this process that look at the environment at the server that runs on this machine."""
    if configured() is None and (beside := running_beside()) is not None:
        os.environ["SANDMILL_API_URL"] = beside.api_url
        os.environ["SANDMILL_API_KEY"] = beside.api_key


def find_sandbox(control: Control, text: str) -> SandboxView:
    """A sandbox by its id, the beginning of it, or its name. Raises NotFoundError, UsageError if it isn't one alone."""
    if SANDBOX_ID.fullmatch(text):
        return control.get(text)
    every = control.list()
    matching = [view for view in every if view.name == text] or [view for view in every if view.id.startswith(text)]
    if not matching or not text:
        raise NotFoundError(f"there is no sandbox {text!r}", code="sandbox_not_found", hint="`sandmill ls` lists them")
    if len(matching) > 1:
        raise UsageError(f"{len(matching)} sandboxes are called {text!r}", hint="give the whole id")
    return matching[0]

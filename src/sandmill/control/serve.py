"""`sandmill serve`: starts or adopts noded, answers until a signal says stop, and leaves nothing behind.

What is started is ended in the opposite order. Nothing here is needed for sandboxes to live: a killed serve leaves noded and
every sandbox as they are, and the next one on the same state directory adopts them.
"""

import asyncio
import errno
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sandmill.backends.node import Noded
from sandmill.control.http import Server
from sandmill.control.state_dir import StateDir
from sandmill.errors import NodeError, UsageError

if TYPE_CHECKING:
    from sandmill.control.app import App
    from sandmill.control.sandboxes import Sandboxes

LAST_CALLS_S: Final = 5.0
"""How long calls that run may still take after a signal."""

log = logging.getLogger("sandmill.serve")


@dataclass(frozen=True)
class Options:
    """What `sandmill serve` was told. Addresses are HOST:PORT; port 0 picks a free one."""

    state_dir: Path
    listen: str = "127.0.0.1:3000"
    data_listen: str = "127.0.0.1:49983"
    keep_sandboxes: bool = False
    """Leave noded and the sandboxes running at the end."""
    embedded: bool = False
    """The server of one process: ends with it, and takes its state directory along."""
    parent_pid: int | None = None
    domain: str | None = None
    """Base domain of {port}-{id}.{domain} addresses."""
    noded_arguments: tuple[str, ...] = ()
    """Further ones of noded's command line."""
    data_url: str | None = None
    """Where clients find the data gateway, if not at its own address (behind a proxy, on a wildcard address)."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @staticmethod
    def parse(text: str, option: str) -> "Address":
        """Raises UsageError."""
        host, colon, port = text.rpartition(":")
        host = host.strip("[]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"{option} {text} is not HOST:PORT", hint=f"for example {option} 127.0.0.1:3000")
        return Address(host, int(port))

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, port: int) -> str:
        return f"http://[{self.host}]:{port}" if ":" in self.host else f"http://{self.host}:{port}"


def run(options: Options) -> None:
    """Serves until SIGTERM or SIGINT. Raises SandmillError when it can't start."""
    import uvloop

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options))


async def _serve(options: Options) -> None:
    api = Address.parse(options.listen, "--listen")
    data = Address.parse(options.data_listen, "--data-listen")
    for option, address in (("--listen", api), ("--data-listen", data)):
        if not address.loopback:
            _say(
                f"warning: {option} {address.host} can be reached from other machines, without TLS: put a proxy before it"
            )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if options.parent_pid is not None:
        _stop_with(options.parent_pid, stop)
    state = StateDir.claim(options.state_dir)
    try:
        listener = _bind(api)
        with listener:
            noded = Noded(
                state.path,
                options.data_listen,
                domain=options.domain,
                dies_with_us=options.embedded,
                arguments=options.noded_arguments,
            )
            async with _node(noded, options), _application(noded, state, options) as app:
                server = Server(app)
                port = await server.listen(listener)
                try:
                    _ready(state, api.url(port), _data_url(noded, options), options)
                    await stop.wait()
                finally:
                    await server.close(LAST_CALLS_S)
    finally:
        state.release()
        if options.embedded:
            shutil.rmtree(state.path, ignore_errors=True)


@asynccontextmanager
async def _node(noded: Noded, options: Options) -> AsyncIterator[None]:
    """noded, while the block runs. It is being started while what comes next is imported."""
    try:
        starting = asyncio.create_task(noded.start())
        await asyncio.sleep(0)
        _import_the_rest()
        await starting
        yield
    finally:
        await noded.stop(keep_sandboxes=options.keep_sandboxes)


def _import_the_rest() -> None:
    import sandmill.control.app
    import sandmill.control.data_path
    import sandmill.control.events
    import sandmill.control.store  # noqa: F401


@asynccontextmanager
async def _application(noded: Noded, state: StateDir, options: Options) -> "AsyncIterator[App]":
    """Everything between noded and HTTP, while the block runs."""
    from sandmill.control.app import App
    from sandmill.control.data_path import opener
    from sandmill.control.environments import Environments
    from sandmill.control.events import follow
    from sandmill.control.sandboxes import Sandboxes
    from sandmill.control.store import MemoryStore, SqliteStore

    data_url = _data_url(noded, options)
    store = MemoryStore() if options.embedded else SqliteStore(state.path / "serve.sqlite")
    sandboxes = Sandboxes(noded.backend, store)
    environments = Environments(sandboxes, noded.backend, opener(sandboxes, data_url))
    events: asyncio.Task[None] | None = None
    try:
        await sandboxes.start()
        events = asyncio.create_task(follow(sandboxes))
        key = state.api_key()
        yield App(sandboxes, environments, noded.backend, key, data_url=data_url, domain=options.domain)
    finally:
        await environments.close()
        if events is not None:
            events.cancel()
        await _end(sandboxes, options)
        store.close()


async def _end(sandboxes: "Sandboxes", options: Options) -> None:
    await sandboxes.close()
    if not options.keep_sandboxes:
        sandboxes.bury_all("the server was stopped")


def _bind(address: Address) -> socket.socket:
    """The API's listening socket. Raises UsageError that says what to do."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        hint = "give another with --listen HOST:PORT"
        if error.errno == errno.EADDRINUSE:
            hint = f"`ss -ltnp sport = :{address.port}` shows who listens there; --listen 127.0.0.1:0 picks a free port"
        raise UsageError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}",
            code="cannot_listen",
            hint=hint,
        ) from error
    return listener


def _data_url(noded: Noded, options: Options) -> str:
    if options.data_url is not None:
        return options.data_url
    address = Address.parse(noded.data_addr, "--data-listen")
    if address.host in ("0.0.0.0", "::"):
        # What clients on this machine can use; others need --data-url.
        return f"http://127.0.0.1:{address.port}"
    return address.url(address.port)


def _ready(state: StateDir, api_url: str, data_url: str, options: Options) -> None:
    state.announce(api_url, data_url)
    print(f"ready api={api_url} data={data_url}", flush=True)
    if not options.embedded:
        kept = state.path / "api-key"
        _say(f"the API key is in {kept}; clients: export SANDMILL_API_URL={api_url} SANDMILL_API_KEY=$(cat {kept})")


def _stop_with(parent_pid: int, stop: asyncio.Event) -> None:
    """Stops when that process ends, however it ends. A descriptor of it, not its number, which may be another's by then."""
    try:
        descriptor = os.pidfd_open(parent_pid)
    except OSError as error:
        raise NodeError("the process that this server was for is gone", code="parent_gone") from error
    asyncio.get_running_loop().add_reader(descriptor, stop.set)
    if os.getppid() != parent_pid:
        stop.set()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

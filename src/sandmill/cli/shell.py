"""`sandmill shell`: a terminal in a sandbox."""

import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import click

from sandmill.cli.client import need_server, server_or_embedded
from sandmill.cli.live import exit_code
from sandmill.cli.options import Spec, environment, place_options, spec_options
from sandmill.errors import SandmillError, UsageError
from sandmill.sdk import Process, Sandbox

KEYS_BYTES = 64 * 1024
SHELLS = ("/bin/bash", "/bin/sh", "/bin/ash")


@click.command("shell")
@spec_options
@place_options
@click.argument("sandbox", required=False)
def shell_command(
    spec: Spec,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    sandbox: str | None,
) -> int:
    """Open a shell in SANDBOX with this terminal, or in a new sandbox that ends with the shell.

    \b
    Examples:
      sandmill shell
      sandmill shell --image debian --network all
      sandmill shell --user user $box
    """
    if not os.isatty(0) or not os.isatty(1):
        raise UsageError("this is no terminal", hint="`sandmill exec ID COMMAND` runs a command without one")
    if sandbox is not None:
        from sandmill.cli.run import connect

        with closing(connect(need_server(), sandbox)) as box:
            return _shell(box, env=environment(env), cwd=workdir, user=user)
    server = server_or_embedded()
    place: dict[str, Any] = {"env": environment(env), "workdir": workdir, "user": user}
    with Sandbox(**spec(), **place, lease_s=60.0, api_url=server.api_url, api_key=server.api_key) as box:
        return _shell(box)


def _shell(box: Sandbox, **place: Any) -> int:
    for program in SHELLS:
        try:
            return in_terminal(box, [program, "-i"], **place)
        except UsageError as error:
            if error.code not in ("command_not_found", "command_not_executable"):
                raise
    raise UsageError("the image has no shell", code="shell_not_found", hint="`sandmill exec ID PROGRAM` runs a program")


def in_terminal(box: Sandbox, command: str | list[str], *, timeout_s: float | None = None, **place: Any) -> int:
    """Runs a command on a terminal in the sandbox that is joined to ours; the exit code."""
    if not os.isatty(0):
        raise UsageError("stdin is no terminal", hint="leave --tty away")
    place["env"] = {"TERM": os.environ.get("TERM", "xterm")} | (place.get("env") or {})
    columns, rows = shutil.get_terminal_size()
    process = box.start(command, pty=(rows, columns), timeout_s=timeout_s, paced=True, **place)
    try:
        with _raw_terminal(), _keyboard(process):
            for piece in process.output(stdout_offset=0):
                sys.stdout.buffer.write(piece.data)
                sys.stdout.buffer.flush()
        return exit_code(process.result or process.wait())
    except BaseException:
        try:
            process.kill()
        except SandmillError:
            pass  # gone already
        raise


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too; the terminal is as before afterwards, whatever happens."""
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is for the shell
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _keyboard(process: Process) -> Iterator[None]:
    """Passes on keys and changes of size, from a thread of its own, while the block runs."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def resized(*_: object) -> None:
        try:
            os.write(wake, b"r")
        except BlockingIOError:
            pass  # it is about to look anyway

    before = signal.signal(signal.SIGWINCH, resized)
    thread = threading.Thread(target=_pass_on, args=(process, woken), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.write(wake, b"q")
        thread.join(2.0)
        os.close(wake)
        os.close(woken)


def _pass_on(process: Process, woken: int) -> None:
    try:
        while True:
            ready, _, _ = select.select([0, woken], [], [])
            if woken in ready:
                if b"q" in os.read(woken, 64):
                    return
                columns, rows = shutil.get_terminal_size()
                process.resize(rows, columns)
            if 0 in ready:
                keys = os.read(0, KEYS_BYTES)
                if not keys:
                    process.close_stdin()
                    return
                process.write(keys)
    except (OSError, SandmillError):
        pass  # it has ended

"""`sandmill run`, `create` and `exec`."""

from contextlib import closing
from typing import Any

import click

from sandmill.cli.client import find_sandbox, need_server, server_or_embedded
from sandmill.cli.live import exit_code, follow, has_input
from sandmill.cli.options import AS_WRITTEN, Spec, command_of, environment, place_options, spec_options
from sandmill.cli.output import print_json, result_as_json
from sandmill.sdk import Sandbox
from sandmill.sdk.configuration import Server
from sandmill.sdk.control import control_of

TIMEOUT = click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="End it after that; 0: never."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, when it has ended.")
TTY = click.option("--tty", "-t", is_flag=True, help="Give it a terminal: ours.")
RUN_LEASE_S = 60.0


@click.command("run", context_settings=AS_WRITTEN)
@spec_options
@place_options
@TIMEOUT
@TTY
@AS_JSON
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(
    spec: Spec,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: float | None,
    tty: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in a new sandbox, which ends with it.

    A COMMAND of several words is a program and its arguments. One word with blanks or other characters of the shell is a
    shell line. Streams are live; stdin is passed on unless it is a terminal.

    \b
    Examples:
      sandmill run true
      sandmill run 'echo "uid $(id -u)"; ls / | wc -l'
      sandmill run --memory-mb 256 --timeout 10 python3 -c 'print(6 * 7)'
      tar c . | sandmill run tar t
      sandmill run -t bash

    Exit code: the command's; 124 at its timeout; 128 + n after signal n; 125 when the sandbox or the server is gone.
    """
    server = server_or_embedded()
    place: dict[str, Any] = {"env": environment(env), "workdir": workdir, "user": user}
    box = Sandbox(**spec(), **place, lease_s=RUN_LEASE_S, api_url=server.api_url, api_key=server.api_key)
    with box:
        return _run(box, command, timeout, tty, as_json, {})


@click.command("create")
@spec_options
@place_options
@click.option(
    "--lease", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True, metavar="SECONDS",
    help="It ends after so long without use.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Everything about it as JSON.")
def create_command(
    spec: Spec,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    lease: float,
    as_json: bool,
) -> None:
    """Make a sandbox that stays, and print its id.

    \b
    Examples:
      sandmill create
      box=$(sandmill create --image debian --memory-mb 512 --lease 3600)
      sandmill create --name builder --metadata job=17
    """
    server = need_server()
    place: dict[str, Any] = {"env": environment(env), "workdir": workdir, "user": user}
    box = Sandbox(**spec(), **place, lease_s=lease, api_url=server.api_url, api_key=server.api_key)
    box.close()
    if as_json:
        print_json(box.info)
    else:
        print(box.id)


@click.command("exec", context_settings=AS_WRITTEN)
@place_options
@TIMEOUT
@TTY
@AS_JSON
@click.argument("sandbox")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: float | None,
    tty: bool,
    as_json: bool,
    sandbox: str,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in SANDBOX (its id, the beginning of it, or its name).

    \b
    Examples:
      sandmill exec $box 'cd /tmp && ls -la'
      sandmill exec $box -- python3 -V
      echo hello | sandmill exec $box cat
      sandmill exec --user user --workdir /home/user $box id

    Exit code: as of `sandmill run`.
    """
    with closing(connect(need_server(), sandbox)) as box:
        place: dict[str, Any] = {"env": environment(env), "cwd": workdir, "user": user}
        return _run(box, command, timeout, tty, as_json, place)


def connect(server: Server, text: str) -> Sandbox:
    """A sandbox by what a person calls it."""
    view = find_sandbox(control_of(server), text)
    return Sandbox.connect(view.id, api_url=server.api_url, api_key=server.api_key)


def _run(
    box: Sandbox, words: tuple[str, ...], timeout: float | None, tty: bool, as_json: bool, place: dict[str, Any]
) -> int:
    command = command_of(words)
    if tty:
        from sandmill.cli.shell import in_terminal

        return in_terminal(box, command, timeout_s=timeout, **place)
    if as_json:
        import sys

        stdin = sys.stdin.buffer.read() if has_input() else None
        result = box.run(command, stdin=stdin, timeout_s=timeout, **place)
        print_json(result_as_json(result))
        return exit_code(result)
    feed = has_input()
    return exit_code(follow(box.start(command, stdin=feed, timeout_s=timeout, paced=True, **place), feed=feed))

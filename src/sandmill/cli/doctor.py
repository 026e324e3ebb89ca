"""`sandmill doctor`."""

import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import click

from sandmill.cli.client import find_server, server_or_embedded
from sandmill.cli.output import print_json
from sandmill.errors import SandmillError
from sandmill.sdk.control import control_of

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}

Check = dict[str, Any]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor_command(as_json: bool) -> int:
    """Say what this machine gives and lacks, and the command that mends it.

    It asks the server that is configured or runs here; without one it starts one for the time of the examination.

    \b
    Examples:
      sandmill doctor
      sandmill doctor --json | jq '.checks[] | select(.status != "ok")'

    Exit code: 1 if a check fails.
    """
    checks = [*_here(), *_node()]
    if as_json:
        print_json({"checks": checks})
    else:
        _print(checks)
    return 1 if any(check["status"] == "fail" for check in checks) else 0


def _here() -> list[Check]:
    """What can be said without a server."""
    from sandmill.backends.node import find_binary

    linux = platform.system() == "Linux"
    checks = [
        _check("system", linux, f"{platform.system()} {platform.release()}", "Linux 5.14 or newer", None),
        _check("python", sys.version_info >= (3, 11), platform.python_version(), "3.11 or newer", None),
    ]
    if find_server() is None:
        root = os.geteuid() == 0
        checks.append(_check("root", root, f"uid {os.geteuid()}", "root, for `sandmill serve`", "sudo sandmill serve"))
    for name in ("noded", "sandboxd"):
        try:
            checks.append(_check(name, True, str(find_binary(name)), "the daemon's program", None))
        except SandmillError as error:
            checks.append(_check(name, False, error.message, "the daemon's program", "make setup"))
    return checks


def _check(name: str, good: bool, found: str, needed: str, fix: str | None) -> Check:
    return {"name": name, "status": "ok" if good else "fail", "found": found, "needed": needed, "fix": fix}


def _node() -> list[Check]:
    """noded's own examination."""
    try:
        document = control_of(server_or_embedded()).document("/v1/doctor")
        checks = document["checks"]
        return checks if isinstance(checks, list) else []
    except SandmillError as error:
        return [{"name": "server", "status": "fail", "found": error.message, "needed": "a server that starts",
                 "fix": error.hint}]  # fmt: skip


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check["name"]) for check in checks)
    for check in checks:
        print(f"{MARKS.get(check['status'], '?   ')} {check['name']:{width}}  {check['found']}")
        if check["status"] != "ok":
            print(f"     {'':{width}}  needed: {check['needed']}")
            if check.get("fix"):
                print(f"     {'':{width}}  mend:   {check['fix']}")
    bad = [check for check in checks if check["status"] == "fail"]
    print(f"\n{len(checks)} checks, {len(bad)} failed" if bad else f"\n{len(checks)} checks, none failed")

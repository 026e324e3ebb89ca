"""`sandmill ls`, `inspect` and `kill`."""

import sys

import click
import msgspec

from sandmill.cli.client import find_sandbox, need_control
from sandmill.cli.options import metadata
from sandmill.cli.output import print_json, print_table, since, until
from sandmill.errors import NotFoundError, SandboxGoneError, SandmillError
from sandmill.wire import SandboxView

AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
FILTER = click.option("--metadata", "-m", "pairs", multiple=True, metavar="KEY=VALUE", help="Only those with this.")


@click.command("ls")
@FILTER
@click.option("--quiet", "-q", is_flag=True, help="Ids only.")
@AS_JSON
def ls_command(pairs: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """List sandboxes.

    \b
    Examples:
      sandmill ls
      sandmill ls --metadata job=17 --json
      sandmill kill $(sandmill ls -q --metadata job=17)
    """
    views = need_control().list(metadata(pairs))
    if as_json:
        print_json(views)
    elif quiet:
        for view in views:
            print(view.id)
    else:
        rows = [(view.id, view.image, since(view.created_at), until(view.expires_at), _limits(view), _about(view))
                for view in views]  # fmt: skip
        print_table(("ID", "IMAGE", "AGE", "LEASE", "LIMITS", "NAME, METADATA"), rows)


def _limits(view: SandboxView) -> str:
    limits = view.limits
    said = [
        f"{limits.cpu:g} cpu" if limits.cpu is not None else "",
        f"{limits.memory_bytes >> 20} MiB" if limits.memory_bytes is not None else "",
        f"disk {limits.disk_bytes >> 20} MiB" if limits.disk_bytes is not None else "",
    ]
    return ", ".join(filter(None, said)) or "-"


def _about(view: SandboxView) -> str:
    pairs = [f"{name}={value}" for name, value in view.metadata.items()]
    text = " ".join(filter(None, [view.name or "", *pairs]))
    printable = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return printable if len(printable) <= 60 else printable[:57] + "..."


@click.command("inspect")
@click.argument("sandbox")
def inspect_command(sandbox: str) -> None:
    """Show everything about a sandbox as JSON: what it is, its limits and what enforces them, what it uses.

    \b
    Examples:
      sandmill inspect $box
      sandmill inspect builder | jq .usage.memory_peak_bytes
    """
    control = need_control()
    view = find_sandbox(control, sandbox)
    print_json(msgspec.to_builtins(view) | {"usage": msgspec.to_builtins(control.usage(view.id))})


@click.command("kill")
@click.argument("sandboxes", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@FILTER
def kill_command(sandboxes: tuple[str, ...], everything: bool, pairs: tuple[str, ...]) -> int:
    """End sandboxes. When this returns, nothing of them is left.

    \b
    Examples:
      sandmill kill $box
      sandmill kill builder ifk3
      sandmill kill --all --metadata job=17

    Exit code: 1 if one of them wasn't there.
    """
    if bool(sandboxes) == (everything or bool(pairs)):
        raise click.UsageError("give SANDBOXES, or --all, or --metadata")
    control = need_control()
    ids: list[str] = [view.id for view in control.list(metadata(pairs))] if not sandboxes else []
    missing = False
    for text in sandboxes:
        try:
            ids.append(find_sandbox(control, text).id)
        except (NotFoundError, SandboxGoneError) as error:
            missing = True
            print(f"error: {error.message}", file=sys.stderr)
    for one in ids:
        try:
            if control.kill(one):
                print(one)
        except SandmillError as error:
            missing = True
            print(f"error: {one}: {error.message}", file=sys.stderr)
    return 1 if missing else 0

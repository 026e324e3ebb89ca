"""`sandmill image`."""

import os
import sys
from pathlib import Path

import click

from sandmill.cli.client import need_control, need_server
from sandmill.cli.options import seconds
from sandmill.cli.output import note, print_json, print_table, since, size
from sandmill.wire import Collection

AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group("image")
def image_group() -> None:
    """Build, list, pull, import, inspect and remove images.

    \b
    Examples:
      sandmill image pull python:3.12
      sandmill image import debian.tar --name debian
      sandmill image build . -t mine
      sandmill image ls
      sandmill run --image debian cat /etc/os-release
    """


@image_group.command("ls")
@AS_JSON
def ls_command(as_json: bool) -> None:
    """List images.

    \b
    Examples:
      sandmill image ls
      sandmill image ls --json
    """
    images = need_control().images()
    if as_json:
        print_json(images)
        return
    rows = [
        (
            ", ".join(image.names) or "-",
            image.id[:19],
            size(image.size_bytes),
            since(image.created_at),
            str(image.in_use),
        )
        for image in images
    ]
    print_table(("NAMES", "ID", "SIZE", "AGE", "IN USE"), rows)


@image_group.command("import")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--name", "-n", help="What to call it (default: the file's own name).")
@click.option(
    "--format", "kind", type=click.Choice(["auto", "oci", "docker-archive", "tar", "dir"]), default="auto",
    show_default=True, help="What PATH is.",
)  # fmt: skip
@AS_JSON
def import_command(path: Path, name: str | None, kind: str, as_json: bool) -> None:
    """Import an OCI layout, a docker archive, a tar of a root file system, or a folder with one. PATH is the server's.

    \b
    Examples:
      docker save debian:12 | cat > debian.tar; sandmill image import debian.tar --name debian
      sandmill image import ./oci-layout
      sandmill image import /srv/rootfs --name mine
    """
    absolute = path.resolve()
    image = need_control().import_image(str(absolute), name or absolute.name.split(".")[0].lower(), kind)
    if as_json:
        print_json(image)
        return
    for warning in image.warnings:
        note(warning)
    print(", ".join(image.names) or image.id)


@image_group.command("pull")
@click.argument("name")
@click.option("--username", "-u", help="Of the registry.  [default: what `docker login` left on the server's machine]")
@click.option("--password-stdin", is_flag=True, help="Read the password, or token, from standard input.")
@click.option("--newest", is_flag=True, help="Ask the registry also when the image is there.")
@AS_JSON
def pull_command(name: str, username: str | None, password_stdin: bool, newest: bool, as_json: bool) -> None:
    """Fetch an image from its registry. Names are Docker's: python:3.12 is docker.io/library/python:3.12.

    \b
    Examples:
      sandmill image pull python:3.12
      sandmill image pull registry.example:5000/team/tool@sha256:0123...
      sandmill image pull ghcr.io/team/private --username me --password-stdin < token
    """
    from sandmill.cli.pulling import pull

    if password_stdin != (username is not None):
        raise click.UsageError("--username and --password-stdin go together")
    credentials = None
    if username is not None:
        credentials = {"username": username, "password": sys.stdin.read().strip()}
    image = pull(need_control(), name, newest=newest, credentials=credentials)
    if as_json:
        print_json(image)
        return
    for warning in image.warnings:
        note(warning)
    print(", ".join(image.names) or image.id)


@image_group.command("gc")
@click.option(
    "--all", "every", is_flag=True, help="Every unused image that can be had again, however full the disk is."
)
@click.option("--imported", is_flag=True, help="Also those that were imported from a file.")
@click.option("--unused-for", metavar="TIME", help="Only what was not used for as long: 90s, 30m, 12h, 7d.")
@click.option("--target-percent", type=click.FloatRange(0, 100), help="Until no more of the disk than this is used.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@AS_JSON
def gc_command(
    every: bool, imported: bool, unused_for: str | None, target_percent: float | None, dry_run: bool, as_json: bool
) -> None:
    """Remove unused images, those first that were used longest ago. Without options: if the disk is over the server's mark.

    What can be had again are pulled images and prepared environments. An image that a sandbox runs on stays.

    \b
    Examples:
      sandmill image gc --all --dry-run
      sandmill image gc --all --unused-for 7d
      sandmill image gc --target-percent 50
    """
    collection = Collection(
        all=every or (unused_for is not None and target_percent is None),
        imported=imported,
        unused_for_s=0.0 if unused_for is None else seconds(unused_for, "--unused-for"),
        target_percent=target_percent,
        dry_run=dry_run,
    )
    collected = need_control().collect_images(collection)
    if as_json:
        print_json(collected)
        return
    for image in collected.removed:
        print(f"{', '.join(image.names) or image.id[:19]}  {size(image.size_bytes)}")
    note(f"{collected.used_percent:.0f} % of the disk is used, {size(collected.free_bytes)} are free")


@image_group.command("build")
@click.argument("context", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--file", "-f", "dockerfile", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The Dockerfile.  [default: CONTEXT/Dockerfile]",
)  # fmt: skip
@click.option("--tag", "-t", "name", help="What to call the image.")
@click.option("--target", metavar="STAGE", help="The stage to build.  [default: the last]")
@click.option(
    "--build-arg", "build_args", multiple=True, metavar="KEY=VALUE",
    help="Value of an ARG; KEY alone: that of this shell's variable. May be repeated.",
)  # fmt: skip
@click.option("--network", type=click.Choice(["none", "all"]), default="all", show_default=True, help="Of RUN.")
@click.option("--no-cache", is_flag=True, help="Run everything anew.")
@AS_JSON
def build_command(
    context: Path,
    dockerfile: Path | None,
    name: str | None,
    target: str | None,
    build_args: tuple[str, ...],
    network: str,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Build an image from the Dockerfile in the folder CONTEXT. What is there already is not run again.

    The steps and their output go to stderr, the image's name to stdout. FROM names an image of the store or of a registry,
    `host`, or scratch. ADD fetches nothing; RUN has no mounts; both are said with their line before anything runs.

    \b
    Examples:
      sandmill image build . -t mine
      sandmill image build app -f app/Dockerfile.test --target test --build-arg VERSION=1.2
      sandmill run --image "$(sandmill image build .)" cat /etc/os-release
    """
    from sandmill.builds import build

    server = need_server()
    built = build(
        context,
        dockerfile,
        name=name,
        target=target,
        build_args=_build_args(build_args),
        network=network,
        no_cache=no_cache,
        on_output=lambda data: (sys.stderr.buffer.write(data), sys.stderr.buffer.flush()),
        api_url=server.api_url,
        api_key=server.api_key,
    )
    if as_json:
        print_json(built)
    else:
        print(built.image)


def _build_args(given: tuple[str, ...]) -> dict[str, str]:
    args = {}
    for one in given:
        name, assigned, value = one.partition("=")
        if not name:
            raise click.BadParameter(f"{one!r} is not KEY=VALUE", param_hint="--build-arg")
        if assigned:
            args[name] = value
        elif name in os.environ:
            args[name] = os.environ[name]
    return args


@image_group.command("inspect")
@click.argument("name")
def inspect_command(name: str) -> None:
    """Show everything about an image as JSON.

    \b
    Example:
      sandmill image inspect debian
    """
    print_json(need_control().image(name))


@image_group.command("rm")
@click.argument("names", nargs=-1, required=True)
def rm_command(names: tuple[str, ...]) -> None:
    """Remove images. One that a sandbox runs on stays, with an error.

    \b
    Example:
      sandmill image rm debian
    """
    control = need_control()
    for name in names:
        control.remove_image(name)
        print(name)

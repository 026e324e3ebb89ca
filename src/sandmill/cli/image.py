"""`sandmill image`."""

from pathlib import Path

import click

from sandmill.cli.client import need_control
from sandmill.cli.output import note, print_json, print_table, since, size

AS_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group("image")
def image_group() -> None:
    """List, import, inspect and remove images.

    \b
    Examples:
      sandmill image import debian.tar --name debian
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

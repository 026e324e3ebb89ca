"""`sandmill serve`."""

from pathlib import Path

import click

from sandmill.sdk.configuration import default_state_dir


@click.command("serve")
@click.option(
    "--listen", default="127.0.0.1:3000", show_default=True, metavar="HOST:PORT", help="The API; port 0: any."
)
@click.option(
    "--data-listen", default="127.0.0.1:49983", show_default=True, metavar="HOST:PORT",
    help="Exec, files and ports of sandboxes; port 0: any.",
)  # fmt: skip
@click.option(
    "--state-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Sandboxes, images, the API key. One server each.  [default: /var/lib/sandmill for root]",
)  # fmt: skip
@click.option("--keep-sandboxes", is_flag=True, help="Leave the sandboxes running at the end, for the next server.")
@click.option("--domain", help="Also reach sandboxes as {port}-{id}.DOMAIN.")
@click.option("--data-url", metavar="URL", help="What clients are told instead of --data-listen's address.")
@click.option(
    "--registries", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
    help="A registries.conf: mirrors, insecure registries.  [default: the machine's, if it has one]",
)  # fmt: skip
@click.option(
    "--image-high-water", type=click.FloatRange(0, 100), default=85, show_default=True, metavar="PERCENT",
    help="Above this share of the disk, unused images that can be had again go; 100: never.",
)  # fmt: skip
@click.option(
    "--image-low-water", type=click.FloatRange(0, 100), default=80, show_default=True, metavar="PERCENT",
    help="Until no more than this is used.",
)  # fmt: skip
def serve_command(
    listen: str,
    data_listen: str,
    state_dir: Path | None,
    keep_sandboxes: bool,
    domain: str | None,
    data_url: str | None,
    registries: Path | None,
    image_high_water: float,
    image_low_water: float,
) -> None:
    """Start the server: the API, and noded, which runs the sandboxes. It prints one line when it is ready.

    SIGTERM or Ctrl-C end it, and all sandboxes unless --keep-sandboxes. If it is killed, sandboxes live on (until their leases
    end), and the next server on the same state directory has them. Addresses other than loopback have no TLS: put a proxy
    before them. SANDMILL_API_KEY sets the API key.

    \b
    Examples:
      sandmill serve
      sandmill serve --listen 127.0.0.1:0 --data-listen 127.0.0.1:0 --state-dir /tmp/mill
      E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:49983 python program-that-uses-e2b.py
    """
    from sandmill.control.serve import Options, run

    if image_low_water > image_high_water:
        raise click.BadParameter("--image-low-water is above --image-high-water")
    noded = ["--image-high-water", str(image_high_water), "--image-low-water", str(image_low_water)]
    if registries is not None:
        noded += ["--registries", str(registries.resolve())]

    run(
        Options(
            state_dir=state_dir or default_state_dir(),
            listen=listen,
            data_listen=data_listen,
            keep_sandboxes=keep_sandboxes,
            domain=domain,
            data_url=data_url,
            noded_arguments=tuple(noded),
        )
    )

"""A pull with a bar for each layer."""

import sys
import threading
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from sandmill.errors import SandmillError
from sandmill.sdk.control import Control
from sandmill.wire import ImageInfo, Pulling

LOOK_S = 0.2


def pull(control: Control, name: str, *, newest: bool, credentials: dict[str, str] | None) -> ImageInfo:
    """Fetches an image; on a terminal its progress is shown on stderr meanwhile. Raises what `pull_image` raises."""
    if not sys.stderr.isatty():
        return control.pull_image(name, newest=newest, credentials=credentials)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(control, name, over), daemon=True)
    watcher.start()
    try:
        return control.pull_image(name, newest=newest, credentials=credentials)
    finally:
        over.set()
        watcher.join(5)


def _watch(control: Control, name: str, over: threading.Event) -> None:
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        while not over.wait(LOOK_S):
            with suppress(SandmillError):  # the pull itself says what is wrong
                for one in control.pulls():
                    if _same(one, name):
                        _show(progress, bars, one)


def _same(pulling: Pulling, name: str) -> bool:
    """Whether a pull on the list is ours: there the name is whole, with its tag."""
    short = name.removeprefix("docker.io/").removeprefix("library/")
    return pulling.name in (short, f"{short}:latest")


def _show(progress: Progress, bars: dict[str, TaskID], pulling: Pulling) -> None:
    for layer in pulling.layers:
        bar = bars.get(layer.digest)
        if bar is None:
            bar = bars[layer.digest] = progress.add_task(
                layer.digest.removeprefix("sha256:")[:12], total=layer.size_bytes
            )
        progress.update(bar, completed=layer.size_bytes if layer.done else layer.read_bytes)

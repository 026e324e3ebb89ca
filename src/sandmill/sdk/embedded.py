"""The embedded server: started with the first sandbox of a process that names no server, and gone with it.

It is a child process with a state directory of its own under the temporary directory. It ends when this process ends, also by
SIGKILL (it asks the kernel for a signal at its parent's death), and removes everything.
"""

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from sandmill.errors import NodeError
from sandmill.sdk.configuration import Server

STOP_S = 30.0

_lock = threading.Lock()
_running: tuple[int, Server] | None = None
"""Owner's pid (a fork must not use its parent's server as its own to stop) and the server."""


def embedded_server() -> Server:
    """The embedded server of this process; started on first use (0.2 s), thread-safe.

    Raises NodeError with what the server said when it can't start.
    """
    global _running
    with _lock:
        if _running is None:
            _running = (os.getpid(), _start())
        return _running[1]


def _start() -> Server:
    folder = Path(tempfile.mkdtemp(prefix="sandmill-"))
    command = [sys.executable, "-m", "sandmill.cli", "serve", "--embedded", "--parent-pid", str(os.getpid())]
    command += ["--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--state-dir", str(folder)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDMILL_API")}
    log = (folder / "serve.log").open("wb")
    # A session of its own: Ctrl-C at a terminal reaches our process, which still needs the server to clean up.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
    )
    log.close()
    assert process.stdout is not None
    line = process.stdout.readline().decode(errors="replace")
    found = re.search(r"ready api=(\S+)", line)
    if found is None:
        process.kill()
        process.wait()
        said = (folder / "serve.log").read_text(errors="replace") if folder.exists() else ""
        tail = (line + said).strip().splitlines()[-1:] or ["it said nothing"]
        _remove(folder)
        raise NodeError(
            f"the embedded server did not start: {tail[0]}", code="node_unavailable", hint="run `sandmill doctor`"
        )
    server = Server(found[1], (folder / "api-key").read_text().strip())
    atexit.register(_stop, process, folder, os.getpid())
    return server


def _stop(process: "subprocess.Popen[bytes]", folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    _remove(folder)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)

"""A command whose streams are those of this process, as they come."""

import os
import sys
import threading

from sandmill.cli.output import note
from sandmill.errors import SandmillError
from sandmill.sdk import Process
from sandmill.wire import Result

TIMED_OUT = 124
INPUT_BYTES = 256 * 1024


def has_input() -> bool:
    """Whether our stdin is something to pass on: not a terminal, not closed."""
    try:
        return not os.isatty(0) and os.fstat(0) is not None
    except OSError:
        return False


def follow(process: Process, *, feed: bool) -> Result:
    """Copies its output to ours until it ends, and our input to it. However this ends, the process has ended then."""
    if feed:
        threading.Thread(target=_feed, args=(process,), daemon=True).start()
    try:
        for piece in process.output(stdout_offset=0, stderr_offset=0):
            if piece.missing_bytes:
                note(f"{piece.missing_bytes} bytes of {piece.stream} are missing: we read too slowly")
            sink = sys.stderr if piece.stream == "stderr" else sys.stdout
            sink.buffer.write(piece.data)
            sink.buffer.flush()
        return process.result or process.wait()
    except BaseException:
        try:
            process.kill()
        except SandmillError:
            pass  # gone already; what we are told of is the first failure
        raise


def _feed(process: Process) -> None:
    try:
        while data := os.read(0, INPUT_BYTES):
            process.write(data)
        process.close_stdin()
    except (OSError, SandmillError):
        pass  # it has ended, or reads no more


def exit_code(result: Result) -> int:
    """The command's own; 124 for a timeout, 128 + n for a signal."""
    if result.reason == "timeout":
        note(f"the command was ended at its timeout, after {result.duration_s:.1f} s")
        return TIMED_OUT
    if result.reason == "oom":
        peak = result.usage.memory_peak_bytes
        note("the command ran out of memory" + (f" (peak {peak >> 20} MiB)" if peak is not None else ""))
    if result.exit_code is not None:
        return result.exit_code
    return 128 + (result.signal or 9)

"""Commands and their results, between clients and sandboxd (protocols.md section 5)."""

import msgspec

from sandmill.errors import CommandError, CommandTimeoutError


class Exec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command: exactly one of `argv` and `shell`."""

    argv: list[str] | None = None
    shell: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    stdin: bytes | None = None
    timeout_s: float | None = None
    output_limit_bytes: int | None = None


class CallUsage(msgspec.Struct, frozen=True):
    """What one call consumed: CPU of everything it started, peak memory of its largest process, block I/O.

    None where it can't be told (the peak of one command of a session, whose shell goes on).
    """

    cpu_s: float | None = None
    memory_peak_bytes: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `exit_code` is None when there is none (a signal, a timeout), never 0 instead."""

    pid: int
    exit_code: int | None = None
    signal: int | None = None
    reason: str = "exited"
    """exited, signaled, timeout, killed or oom."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_cut: tuple[int, int] | None = None
    """Where output is missing and how many bytes, when it went over the limit."""
    stderr_cut: tuple[int, int] | None = None
    duration_s: float = 0.0
    usage: CallUsage = CallUsage()
    session_alive: bool = True
    """Only of a session's command: whether the shell still lives."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """stdout as text; bytes that aren't UTF-8 become replacement characters."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """stderr as text; bytes that aren't UTF-8 become replacement characters."""
        return self.stderr.decode(errors="replace")

    def check(self) -> "Result":
        """Itself, if it ended with exit code 0.

        Raises:
            CommandTimeoutError: it ran into its timeout.
            CommandError: it ended in any other way.
        """
        if self.ok:
            return self
        last = self.error_text.strip().splitlines()[-1:] or self.text.strip().splitlines()[-1:]
        tail = f": {last[0][:300]}" if last else ""
        if self.reason == "timeout":
            raise CommandTimeoutError(
                f"the command ran into its timeout after {self.duration_s:.1f} s{tail}", result=self
            )
        how = f"exit code {self.exit_code}" if self.exit_code is not None else f"{self.reason} (signal {self.signal})"
        raise CommandError(f"the command ended with {how}{tail}", result=self)


class ProcInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process started on its own."""

    pid: int
    argv: list[str] = []
    cwd: str | None = None
    tag: str | None = None
    pty: bool = False
    started_at: float = 0.0
    running: bool = True
    result: Result | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox consumes."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int | None = None
    pids: int = 0
    io_read_bytes: int = 0
    io_write_bytes: int = 0
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    oom_kills: int = 0
    at: float = 0.0

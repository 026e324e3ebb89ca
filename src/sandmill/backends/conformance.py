"""The conformance suite: what every backend has to do, as async functions that any test runner can drive.

```python
from sandmill.backends import conformance

@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check):
    await conformance.run(check, MySubject())
```

A `Subject` is a backend and a way to a sandbox's own calls. A check that needs something the backend does not claim in
`capabilities` raises `NotClaimed` (skip it); nothing else is skipped. A backend's known failures belong into a commented
list beside its test; an entry that starts to pass has to go.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from sandmill.backends.base import Backend, SandboxIO
from sandmill.errors import NotFoundError, SandboxGoneError, SandmillError, UsageError
from sandmill.wire import Exec, Lease, LimitSpec, Result, SandboxInfo, SandboxSpec

SHELL = "shell"
"""Runs a real shell with the usual programs."""
PROCESSES = "processes"
"""Has real processes: background children, trees, setsid."""
LIMITS = "limits"
"""Enforces memory limits and says an out-of-memory kill."""
CAPABILITIES = frozenset({SHELL, PROCESSES, LIMITS})


class NotClaimed(Exception):  # noqa: N818 - no error: a reason to skip
    """The backend does not claim what the check needs."""


class Subject(Protocol):
    """What is tested."""

    backend: Backend
    capabilities: frozenset[str]

    async def io(self, sandbox_id: str, token: str) -> SandboxIO:
        """A sandbox's own calls."""
        ...

    async def pass_time(self, seconds: float) -> None:
        """Lets that much time pass for leases: moves a fake clock, or sleeps."""
        ...


Check = Callable[[Subject], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


async def run(one: Check, subject: Subject) -> None:
    """Runs one check; raises AssertionError (it fails) or NotClaimed (not for this backend)."""
    await one(subject)


def needs(subject: Subject, capability: str) -> None:
    if capability not in subject.capabilities:
        raise NotClaimed(capability)


def new_spec(**fields: Any) -> SandboxSpec:
    defaults: dict[str, Any] = {"image": "host", "token": uuid.uuid4().hex, "lease": Lease(60.0)}
    return SandboxSpec(id="i" + uuid.uuid4().hex[:19], **(defaults | fields))


@asynccontextmanager
async def sandbox(subject: Subject, **fields: Any) -> AsyncIterator[tuple[SandboxInfo, SandboxIO]]:
    """A sandbox for one check; ended after it, whatever happened."""
    spec = new_spec(**fields)
    info = await subject.backend.create(spec)
    io = await subject.io(spec.id, spec.token)
    try:
        yield info, io
    finally:
        await io.close()
        try:
            await subject.backend.destroy(spec.id)
        except (NotFoundError, SandboxGoneError):
            pass


async def sh(io: SandboxIO, line: str, **fields: Any) -> Result:
    return await io.run(Exec(shell=line, **fields))


async def raises(awaitable: Awaitable[Any], *kinds: type[SandmillError]) -> SandmillError:
    try:
        await awaitable
    except kinds as raised:
        error = raised
    else:
        raise AssertionError(f"nothing was raised; expected one of {[kind.__name__ for kind in kinds]}")
    assert error.code, "an error has a code"
    assert error.message, "an error says what happened"
    return error


# Lifecycle.


@check
async def create_gives_a_running_sandbox(subject: Subject) -> None:
    async with sandbox(subject, env={"A": "1"}) as (info, _):
        assert info.state == "running"
        assert info.expires_at > info.created_at
        seen = await subject.backend.get(info.id)
        assert (seen.id, seen.image) == (info.id, info.image)
        assert info.id in [one.id for one in (await subject.backend.inventory()).live]


@check
async def create_is_idempotent(subject: Subject) -> None:
    spec = new_spec()
    first, second = await asyncio.gather(subject.backend.create(spec), subject.backend.create(spec))
    try:
        assert first.id == second.id == spec.id
        third = await subject.backend.create(spec)
        assert third.created_at == first.created_at, "a second create made a second sandbox"
    finally:
        await subject.backend.destroy(spec.id)


@check
async def an_unknown_image_is_an_error(subject: Subject) -> None:
    error = await raises(subject.backend.create(new_spec(image="no-such-image")), NotFoundError)
    assert error.code == "image_not_found"


@check
async def destroy_ends_it_once(subject: Subject) -> None:
    spec = new_spec()
    await subject.backend.create(spec)
    io = await subject.io(spec.id, spec.token)
    await subject.backend.destroy(spec.id)
    await raises(subject.backend.destroy(spec.id), NotFoundError, SandboxGoneError)
    await raises(subject.backend.get(spec.id), SandboxGoneError)
    assert spec.id not in [one.id for one in (await subject.backend.inventory()).live]
    await raises(io.run(Exec(argv=["true"])), SandboxGoneError)
    await io.close()


@check
async def an_end_has_its_cause(subject: Subject) -> None:
    spec = new_spec()
    await subject.backend.create(spec)
    await subject.backend.destroy(spec.id)
    error = await raises(subject.backend.get(spec.id), SandboxGoneError)
    assert isinstance(error, SandboxGoneError)
    assert error.cause == "killed"
    ended = {end.id: end for end in (await subject.backend.inventory()).ended}
    assert ended[spec.id].cause == "killed"


@check
async def what_never_was_is_not_found(subject: Subject) -> None:
    error = await raises(subject.backend.get("i" + "0" * 19), NotFoundError)
    assert error.code == "sandbox_not_found"


@check
async def events_tell_of_ends(subject: Subject) -> None:
    start = (await subject.backend.events(0, 0)).next
    spec = new_spec()
    await subject.backend.create(spec)
    await subject.backend.destroy(spec.id)
    events = await subject.backend.events(start, 5.0)
    assert spec.id in [end.id for end in events.ended]
    assert events.next > start


@check
async def a_lease_ends_a_sandbox(subject: Subject) -> None:
    spec = new_spec(lease=Lease(1.5, False))
    await subject.backend.create(spec)
    await subject.pass_time(4.0)
    error = await raises(subject.backend.get(spec.id), SandboxGoneError)
    assert isinstance(error, SandboxGoneError)
    assert error.cause == "lease_expired"


@check
async def renewal_keeps_a_sandbox(subject: Subject) -> None:
    async with sandbox(subject, lease=Lease(1.5, False)) as (info, _):
        gone = await subject.backend.renew({info.id: 60.0, "i" + "0" * 19: 60.0})
        assert gone == ["i" + "0" * 19]
        await subject.pass_time(4.0)
        assert (await subject.backend.get(info.id)).state == "running"


@check
async def use_renews_a_lease(subject: Subject) -> None:
    async with sandbox(subject, lease=Lease(3.0, True)) as (info, io):
        for _ in range(3):
            await subject.pass_time(2.0)
            assert (await io.run(Exec(argv=["true"]))).exit_code == 0
        assert (await subject.backend.get(info.id)).state == "running"


@check
async def usage_is_told(subject: Subject) -> None:
    async with sandbox(subject, limits=LimitSpec(memory_bytes=256 << 20)) as (info, io):
        await io.run(Exec(argv=["true"]))
        usage = await subject.backend.usage(info.id)
        assert usage.memory_limit_bytes == 256 << 20
        assert usage.cpu_s >= 0
        assert usage.at > 0


@check
async def a_commit_becomes_an_image(subject: Subject) -> None:
    spec = new_spec()
    await subject.backend.create(spec)
    io = await subject.io(spec.id, spec.token)
    await io.write("/opt/kept", b"kept\n")
    await io.close()
    image = await subject.backend.commit(spec.id, None)
    try:
        await raises(subject.backend.get(spec.id), SandboxGoneError)
        async with sandbox(subject, image=image.id) as (_, second):
            assert await second.read("/opt/kept") == b"kept\n"
            assert (await second.run(Exec(argv=["cat", "/opt/kept"]))).stdout == b"kept\n"
    finally:
        await subject.backend.remove_image(image.id)


@check
async def two_sandboxes_share_nothing(subject: Subject) -> None:
    async with sandbox(subject) as (_, one), sandbox(subject) as (_, other):
        await one.write("/tmp/mine", b"x")
        await raises(other.read("/tmp/mine"), NotFoundError)
        assert "mine" not in await other.names("/tmp")


# Commands (anchors: the public cases 8, 11, 12, 13, 14).


@check
async def output_is_exact(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        assert (await sh(io, "printf hello")).stdout == b"hello"
        assert (await sh(io, r"printf 'a\r\nb'")).stdout == b"a\r\nb"
        assert (await sh(io, r"printf '1\0002'")).stdout == b"1\x002"
        result = await sh(io, "printf 'runuser: user q does not exist' >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"", b"runuser: user q does not exist")


@check
async def exit_codes_are_exact(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        for code in (0, 1, 200, 255):
            result = await sh(io, f"exit {code}")
            assert (result.exit_code, result.reason, result.signal) == (code, "exited", None)


@check
async def a_signal_is_no_exit_code(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        for name, number in (("9", 9), ("SEGV", 11)):
            result = await sh(io, f"kill -{name} $$")
            assert (result.exit_code, result.signal, result.reason) == (None, number, "signaled")
        assert (await sh(io, "echo alive")).stdout == b"alive\n"


@check
async def argv_is_not_a_shell_line(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        assert (await io.run(Exec(argv=["echo", "$HOME;", "a  b", "*"]))).stdout == b"$HOME; a  b *\n"


@check
async def a_missing_program_is_an_error(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        error = await raises(io.run(Exec(argv=["no-such-program"])), UsageError)
        assert error.code == "command_not_found"
        assert (await sh(io, "no-such-program")).exit_code == 127


@check
async def a_missing_directory_runs_nothing(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        error = await raises(sh(io, "true; touch /tmp/M", cwd="/nope"), UsageError)
        assert error.code == "cwd_not_found"
        assert "/nope" in error.message
        assert "M" not in await io.names("/tmp")
        assert (await sh(io, "true; pwd", cwd="/tmp")).stdout == b"/tmp\n"


@check
async def the_environment_arrives(subject: Subject) -> None:
    async with sandbox(subject, env={"BOX": "1", "BOTH": "box"}) as (_, io):
        result = await io.run(Exec(argv=["env"], env={"CALL": "a'b\"$x", "BOTH": "call"}))
        lines = result.stdout.decode().splitlines()
        assert {"BOX=1", "BOTH=call", "CALL=a'b\"$x"} <= set(lines)


@check
async def a_nul_is_refused(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        await raises(io.run(Exec(argv=["echo", "a\0b"])), UsageError)
        assert (await sh(io, "echo next")).stdout == b"next\n"


@check
async def stdin_arrives(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        assert (await io.run(Exec(argv=["cat"], stdin=b"\x00\xff in"))).stdout == b"\x00\xff in"
        assert (await io.run(Exec(argv=["cat"]))).stdout == b"", "without stdin a program sees its end"


@check
async def a_timeout_is_a_result(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        result = await sh(io, "echo so far; sleep 30; echo never", timeout_s=0.5)
        assert (result.reason, result.exit_code, result.stdout) == ("timeout", None, b"so far\n")
        assert (await sh(io, "echo next")).stdout == b"next\n"


@check
async def no_timeout_is_no_deadline(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        assert (await sh(io, "sleep 1; echo ok", timeout_s=0)).stdout == b"ok\n"


@check
async def what_is_cut_is_said(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        result = await io.run(Exec(argv=["cat"], stdin=bytes(range(256)) * 40, output_limit_bytes=1000))
        assert result.stdout_cut is not None
        offset, missing = result.stdout_cut
        assert (len(result.stdout), missing) == (1000, 10240 - 1000)
        whole = bytes(range(256)) * 40
        assert result.stdout == whole[:offset] + whole[offset + missing :]


# Files.


@check
async def a_file_comes_back(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        data = bytes(range(256)) * 1000
        await io.write("/tmp/deep/er/data", data)
        assert await io.read("/tmp/deep/er/data") == data
        await io.write("/tmp/deep/er/data", b"")
        assert await io.read("/tmp/deep/er/data") == b""
        assert await io.names("/tmp/deep") == ["er"]
        await io.remove("/tmp/deep")
        await raises(io.read("/tmp/deep/er/data"), NotFoundError)


@check
async def commands_see_files_and_files_see_commands(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        await io.write("/tmp/in", b"in")
        assert (await io.run(Exec(argv=["cat", "/tmp/in"]))).stdout == b"in"
        await sh(io, "echo out > /tmp/out")
        assert await io.read("/tmp/out") == b"out\n"


@check
async def what_is_no_file_is_said(subject: Subject) -> None:
    async with sandbox(subject) as (_, io):
        assert (await raises(io.read("/tmp"), UsageError)).code == "is_a_directory"
        await raises(io.read("/tmp/none"), NotFoundError)
        await raises(io.names("/tmp/none"), NotFoundError)
        await raises(io.remove("/tmp/none"), NotFoundError)


# What only a real shell and real processes can show.


@check
async def a_pipe_held_by_a_child_ends_nothing_late(subject: Subject) -> None:
    needs(subject, PROCESSES)
    async with sandbox(subject) as (_, io):
        result = await sh(io, "sleep 1000 & echo started", timeout_s=20)
        assert (result.reason, result.exit_code, result.stdout) == ("exited", 0, b"started\n")
        assert result.duration_s < 5


@check
async def a_timeout_ends_the_whole_tree(subject: Subject) -> None:
    needs(subject, PROCESSES)
    async with sandbox(subject) as (_, io):
        await sh(io, "sleep 1001 & echo")
        result = await sh(io, "setsid sleep 1002 & (sleep 1003 &); sleep 1004", timeout_s=0.5)
        assert result.reason == "timeout"
        alive = (await sh(io, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.decode()
        assert "1001" in alive, "a process of an earlier call was ended"
        assert not [number for number in ("1002", "1003", "1004") if number in alive], alive


@check
async def long_arguments_work_or_say_so(subject: Subject) -> None:
    needs(subject, SHELL)
    async with sandbox(subject) as (_, io):
        long = "x" * 200_000
        for command in (Exec(shell=f": {long}"), Exec(argv=["true"], env={"LONG": long})):
            try:
                code: str | int | None = (await io.run(command)).exit_code
            except UsageError as error:
                code = error.code
            assert code in (0, "arguments_too_long")
        newline = "a\nb'\"$x"
        assert (await sh(io, 'printf %s "$V"', env={"V": newline})).stdout == newline.encode()


@check
async def big_output_does_not_block(subject: Subject) -> None:
    needs(subject, SHELL)
    async with sandbox(subject) as (_, io):
        result = await sh(io, "head -c 5000000 /dev/zero; head -c 3000000 /dev/zero >&2")
        assert (len(result.stdout), len(result.stderr)) == (5_000_000, 3_000_000)


@check
async def the_user_is_who_was_asked(subject: Subject) -> None:
    needs(subject, SHELL)
    async with sandbox(subject) as (_, io):
        assert (await sh(io, 'id -u; echo "$HOME"')).stdout == b"0\n/root\n"
        assert (await sh(io, "id -u; id -g", user="1234:2345")).stdout == b"1234\n2345\n"
        error = await raises(sh(io, "true", user="nobody-of-that-name"), UsageError)
        assert error.code == "user_not_found"


@check
async def a_write_is_never_half(subject: Subject) -> None:
    """Case 2: a reader inside sees the old file or the new one."""
    needs(subject, SHELL)
    async with sandbox(subject) as (_, io):
        size = 1 << 20
        await io.write("/tmp/f", b"A" * size)
        await sh(io, "chmod 750 /tmp/f")
        loop = "while [ ! -e /tmp/stop ]; do head -c 2000000 /tmp/f | tr -d AB | wc -c; stat -c '%s %a' /tmp/f; done | sort -u"
        reading = asyncio.create_task(sh(io, loop, timeout_s=60))
        for letter in (b"B", b"A") * 10:
            await io.write("/tmp/f", letter * size)
        await io.write("/tmp/stop", b"")
        assert (await reading).stdout.split(b"\n")[:-1] == [b"0", b"%d 750" % size]


@check
async def an_out_of_memory_kill_is_said(subject: Subject) -> None:
    needs(subject, LIMITS)
    async with sandbox(subject, limits=LimitSpec(memory_bytes=64 << 20)) as (info, io):
        result = await sh(io, "head -c 300000000 /dev/zero | tail -c 299999999 > /dev/null; exit $?")
        usage = await subject.backend.usage(info.id)
        assert usage.oom_kills >= 1
        assert usage.memory_peak_bytes >= 50 << 20
        assert result.exit_code != 0
        assert (await sh(io, "echo alive")).stdout == b"alive\n"

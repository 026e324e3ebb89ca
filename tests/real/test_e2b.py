"""The unmodified E2B SDK drives `sandmill serve`."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FileType,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from .conftest import Server


@pytest.fixture
def e2b(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The E2B SDK's environment."""
    monkeypatch.setenv("E2B_API_URL", server.api_url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.data_url)
    monkeypatch.setenv("E2B_API_KEY", server.api_key)
    return server


@pytest.fixture
def box(e2b: Server) -> Iterator[Sandbox]:
    made = Sandbox.create(allow_internet_access=False, timeout=120)
    yield made
    made.kill()


def eventually(condition: object, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


# Commands


def test_commands(box: Sandbox) -> None:
    result = box.commands.run("id -un; pwd; echo err >&2; printf 'no newline'")
    assert (result.stdout, result.stderr, result.exit_code) == ("user\n/home/user\nno newline", "err\n", 0)
    assert box.commands.run("id -un", user="root").stdout == "root\n"
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert box.commands.run('printf %s "$A"', envs={"A": "a\nb'\"$x`"}).stdout == "a\nb'\"$x`"
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo out; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")


def test_environment_of_create(e2b: Server) -> None:
    with Sandbox.create(envs={"WHERE": "here"}, allow_internet_access=False) as made:
        assert made.commands.run("echo $WHERE").stdout == "here\n"


def test_streams_are_live(box: Sandbox) -> None:
    seen: list[tuple[str, float]] = []
    began = time.monotonic()
    box.commands.run("echo a; sleep 0.5; echo b", on_stdout=lambda text: seen.append((text, time.monotonic() - began)))
    assert [text for text, _ in seen] == ["a\n", "b\n"]
    assert seen[1][1] - seen[0][1] > 0.3


def test_a_large_output_is_whole(box: Sandbox) -> None:
    result = box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert result.stdout == "x" * 3_000_000


def test_background_stdin_and_kill(box: Sandbox) -> None:
    cat = box.commands.run("cat", background=True, stdin=True)
    assert cat.pid in [process.pid for process in box.commands.list()]
    box.commands.send_stdin(cat.pid, "first\n")
    box.commands.close_stdin(cat.pid)
    assert cat.wait().stdout == "first\n"
    sleeper = box.commands.run("sleep 1000", background=True)
    again = box.commands.connect(sleeper.pid)
    assert box.commands.kill(sleeper.pid)
    with pytest.raises(CommandExitException):
        again.wait()
    assert not box.commands.kill(sleeper.pid)


def test_a_background_child_does_not_hold_the_command(box: Sandbox) -> None:
    began = time.monotonic()
    assert box.commands.run("sleep 30 & echo started").stdout == "started\n"
    assert time.monotonic() - began < 10


def test_timeout_ends_what_was_started(box: Sandbox) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        box.commands.run("setsid sleep 4711 & sleep 4711", timeout=0.5)
    assert time.monotonic() - began < 5
    assert eventually(lambda: box.commands.run("pgrep -f 'sleep 4711' || true").stdout.count("\n") <= 1)


def test_no_timeout(box: Sandbox) -> None:
    assert box.commands.run("sleep 1; echo ok", timeout=0).stdout == "ok\n"


# Terminals


def test_terminal(box: Sandbox) -> None:
    seen = bytearray()
    terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=30)
    box.pty.send_stdin(terminal.pid, b"stty size; tty; exit 7\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=seen.extend)
    assert ended.value.exit_code == 7
    assert b"24 80" in seen
    assert b"/dev/pts/" in seen


def test_terminal_interrupt_and_resize(box: Sandbox) -> None:
    seen = bytearray()
    terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=30)

    def read() -> None:
        try:
            terminal.wait(on_pty=seen.extend)
        except CommandExitException:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    box.pty.resize(terminal.pid, PtySize(rows=40, cols=100))
    box.pty.send_stdin(terminal.pid, b"stty size; sleep 1000\n")
    assert eventually(lambda: b"40 100" in seen)
    box.pty.send_stdin(terminal.pid, b"\x03")
    box.pty.send_stdin(terminal.pid, b"echo code $?\nexit\n")
    reader.join(15)
    assert not reader.is_alive()
    assert b"code 130" in seen


# Files


def test_files(box: Sandbox) -> None:
    assert box.files.write("/home/user/n1/n2/f", "text").path == "/home/user/n1/n2/f"
    assert box.files.read("/home/user/n1/n2/f") == "text"
    data = bytes(range(256)) * 10_000
    box.files.write("/tmp/b", data)
    assert box.files.read("/tmp/b", format="bytes") == data
    assert box.commands.run("stat -c '%U %a' /home/user/n1 /home/user/n1/n2/f").stdout == "user 755\nuser 644\n"
    box.commands.run("rm -r ~/n1")
    with pytest.raises(FileNotFoundException):
        box.files.read("/home/user/n1/n2/f")
    assert box.files.make_dir("/home/user/d")
    assert not box.files.make_dir("/home/user/d")
    box.files.write_files([{"path": "/home/user/d/a", "data": "1"}, {"path": "/home/user/d/b", "data": "2"}])
    assert [(entry.name, entry.type) for entry in box.files.list("/home/user/d")] == [
        ("a", FileType.FILE),
        ("b", FileType.FILE),
    ]
    assert box.files.rename("/home/user/d/a", "/home/user/d/c").name == "c"
    assert box.files.exists("/home/user/d/c")
    box.files.remove("/home/user/d")
    assert not box.files.exists("/home/user/d")


def test_watch(box: Sandbox) -> None:
    box.files.make_dir("/home/user/w")
    watch = box.files.watch_dir("/home/user/w")
    box.files.write("/home/user/w/new", "x")
    found: list[str] = []

    def seen() -> bool:
        found.extend(event.name for event in watch.get_new_events())
        return "new" in found

    assert eventually(seen)
    watch.stop()


# Life


def test_info_list_and_kill(e2b: Server) -> None:
    metadata = {"p": "/a/b c&d=\u00e9", "k": "x" * 300, "e": ""}
    made = Sandbox.create(metadata=metadata, timeout=60, allow_internet_access=False)
    info = made.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata) == (made.sandbox_id, "base", metadata)
    assert (info.state, info.allow_internet_access) == (SandboxState.RUNNING, False)
    assert 55 < (info.end_at - info.started_at).total_seconds() < 65
    for name, value in metadata.items():
        (found,) = Sandbox.list(query=SandboxQuery(metadata={name: value})).next_items()
        assert found.sandbox_id == made.sandbox_id
    assert Sandbox.list(query=SandboxQuery(metadata={"e": "other"})).next_items() == []
    assert made.is_running()
    assert Sandbox.connect(made.sandbox_id).commands.run("echo hi").stdout == "hi\n"
    assert made.kill()
    assert not made.kill()
    assert not made.is_running()
    with pytest.raises(TimeoutException):
        made.commands.run("true")
    with pytest.raises(NotFoundException):
        Sandbox.connect(made.sandbox_id)


def test_timeout_of_a_sandbox(e2b: Server) -> None:
    made = Sandbox.create(timeout=60, allow_internet_access=False)
    made.set_timeout(1)
    assert eventually(lambda: not made.is_running())


def test_use_does_not_renew(e2b: Server) -> None:
    made = Sandbox.create(timeout=2, allow_internet_access=False)
    deadline = time.monotonic() + 10
    try:
        while time.monotonic() < deadline:
            made.commands.run("true")
            time.sleep(0.1)
    except SandboxException:
        pass
    assert time.monotonic() < deadline


def test_metrics(box: Sandbox) -> None:
    box.commands.run("python3 -c 'sum(range(10**7))'")
    (metrics,) = box.get_metrics()
    assert metrics.cpu_count >= 1
    assert 0 < metrics.mem_used <= metrics.mem_total


def test_what_is_not_there_is_said(box: Sandbox) -> None:
    with pytest.raises(SandboxException, match="501"):
        box.pause()
    with pytest.raises(SandboxException, match="autoPause"):
        Sandbox.create(lifecycle={"on_timeout": "pause"})
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template")


def test_a_wrong_key(e2b: Server) -> None:
    with pytest.raises(Exception, match="401"):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_one_create_a_key(e2b: Server) -> None:
    first = Sandbox.create(idempotency_key="once-1", allow_internet_access=False)
    second = Sandbox.create(idempotency_key="once-1", allow_internet_access=False)
    assert first.sandbox_id == second.sandbox_id
    first.kill()


def test_lists_while_others_kill(e2b: Server) -> None:
    """Two clients kill ten each, both try all; a third pages throughout."""
    mark = {"test": "concurrent-kills"}
    boxes = [Sandbox.create(metadata=mark, allow_internet_access=False, timeout=120) for _ in range(20)]
    survivors = {box.sandbox_id for box in boxes[::4]}
    doomed = [box for box in boxes if box.sandbox_id not in survivors]
    killed: list[tuple[str, bool]] = []
    done = threading.Event()
    problems: list[str] = []

    def kill() -> None:
        for box in doomed:
            success = Sandbox.kill(box.sandbox_id)
            killed.append((box.sandbox_id, success))

    def sweep() -> None:
        while not done.is_set():
            before = {one for one, success in list(killed) if success}
            pages = Sandbox.list(query=SandboxQuery(metadata=mark), limit=3)
            found: list[str] = []
            while pages.has_next:
                found += [item.sandbox_id for item in pages.next_items()]
            if len(found) != len(set(found)) or not survivors <= set(found) or before & set(found):
                problems.append(f"{len(found)} found, {before & set(found)} after their end")

    sweeper = threading.Thread(target=sweep)
    killers = [threading.Thread(target=kill) for _ in range(2)]
    for thread in (sweeper, *killers):
        thread.start()
    for thread in killers:
        thread.join(60)
    done.set()
    sweeper.join(60)
    assert problems == []
    assert sorted(one for one, success in killed if success) == sorted(box.sandbox_id for box in doomed)
    for box in boxes:
        if box.sandbox_id in survivors:
            assert box.kill()


async def test_asyncio(e2b: Server) -> None:
    made = await AsyncSandbox.create(allow_internet_access=False, timeout=60)
    try:
        results = await asyncio.gather(*(made.commands.run(f"echo {number}") for number in range(5)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(5)]
        handle = await made.commands.run("cat", background=True, stdin=True)
        await made.commands.send_stdin(handle.pid, "hi\n")
        await made.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "hi\n"
        await made.files.write("/tmp/x", b"\x00\xff")
        assert await made.files.read("/tmp/x", format="bytes") == b"\x00\xff"
        assert (await made.get_info()).sandbox_id == made.sandbox_id
    finally:
        assert await made.kill()
    assert not await made.kill()

"""What Inspect's self-check leaves open about the provider; test_inspect.py runs this file with Inspect's interpreter."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._concurrency import init_concurrency
from inspect_ai.util._sandbox.environment import resolve_sandbox_environment
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.limits import override_max_exec_output_size, override_max_read_file_size
from inspect_ai.util._subprocess import max_subprocesses_context_var

from sandmill import AsyncSandbox, Sandbox, SandboxGoneError, SandmillError, TransportError
from sandmill.clients.inspect import CLIENT, SandmillConfig, SandmillSandboxEnvironment, _seen_by_inspect, config_of

Environment = SandmillSandboxEnvironment


async def made(**fields: object) -> Environment:
    environments = await Environment.sample_init("provider", SandmillConfig(**fields), {"__sample_id__": "one"})  # type: ignore[arg-type]
    return environments["default"].as_type(Environment)


async def end(environment: Environment) -> None:
    await Environment.sample_cleanup("provider", None, {"default": environment}, False)


@pytest.fixture(params=[None, "user"])
async def env(request: pytest.FixtureRequest) -> AsyncIterator[Environment]:
    environment = await made(user=request.param)
    yield environment
    await end(environment)


@pytest.fixture
async def unprivileged() -> AsyncIterator[Environment]:
    environment = await made(user="user", workdir="/work/here")
    yield environment
    await end(environment)


def left() -> list[str]:
    return [view.id for view in Sandbox.list(CLIENT)]


async def succeeds(environment: Environment, line: str) -> bool:
    return (await environment.exec(["sh", "-c", line])).success


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(400):
        if await holds():
            return
        await asyncio.sleep(0.05)
    pytest.fail("it did not come to hold in 20 seconds")


# commands


async def test_what_a_command_is_at_fault_for_is_its_result(env: Environment) -> None:
    missing = await env.exec(["no-such-program"])
    assert (missing.success, missing.returncode, missing.stderr) == (
        False,
        127,
        "there is no program no-such-program\n",
    )
    nowhere = await env.exec(["true"], cwd="/nowhere")
    assert (nowhere.success, nowhere.returncode, nowhere.stderr) == (
        False,
        126,
        "the working directory /nowhere does not exist\n",
    )
    assert (await env.exec(["true", *["x" * 1000] * 5000])).returncode == 126
    assert (await env.exec(["sh", "-c", "kill -9 $$"])).returncode == 137
    failed = await env.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (failed.success, failed.returncode, failed.stdout, failed.stderr) == (False, 3, "out\n", "err\n")
    assert (await env.exec(["printf", "\\377"])).stdout == "�"


async def test_a_working_directory_that_the_model_removed_is_the_models_fault(unprivileged: Environment) -> None:
    assert (await unprivileged.exec(["sh", "-c", "echo a > a && pwd"])).stdout == "/work/here\n"
    await unprivileged.exec(["rm", "-r", "/work/here"], user="root")
    gone = await unprivileged.exec(["true"])
    assert (gone.returncode, gone.stderr) == (126, "the working directory /work/here does not exist\n")


async def test_a_user_that_is_not_there_is_no_result(env: Environment) -> None:
    with pytest.raises(SandboxUserUnsupportedError, match="nobody-knows"):
        await env.exec(["true"], user="nobody-knows")


async def test_a_null_byte_is_what_python_says(env: Environment) -> None:
    for broken in (
        env.exec(["echo", "a\0b"]),
        env.exec(["true"], cwd="a\0b"),
        env.exec(["true"], env={"A": "\0"}),
        env.read_file("a\0b"),
        env.write_file("a\0b", "x"),
    ):
        with pytest.raises(ValueError, match="embedded null byte"):
            await broken


async def test_a_timeout_has_the_output_so_far_and_is_never_retried(env: Environment) -> None:
    with pytest.raises(TimeoutError, match="after 1 seconds") as caught:
        await env.exec(["sh", "-c", "echo run >> runs; echo so far; sleep 60"], timeout=1)
    assert caught.value.truncated_output == "so far\n"  # type: ignore[attr-defined]
    assert await env.read_file("runs") == "run\n"


async def test_output_up_to_the_limit_is_whole_and_beyond_it_is_an_error(env: Environment) -> None:
    with override_max_exec_output_size(1024):
        assert (await env.exec(["head", "-c", "1024", "/dev/zero"])).stdout == "\0" * 1024
        with pytest.raises(OutputLimitExceededError, match="limit of 1 KiB") as caught:
            await env.exec(["sh", "-c", "printf first; head -c 4000 /dev/zero; printf last"])
    said = caught.value.truncated_output or ""
    assert said.startswith("first")
    assert said.endswith("last")
    assert "bytes are missing here" in said


async def test_a_cancelled_command_is_ended(env: Environment) -> None:
    running = asyncio.ensure_future(env.exec(["sh", "-c", "touch began; sleep 4321"]))
    await until(lambda: succeeds(env, "test -e began"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: succeeds(env, "! ps -eo args | grep -qx 'sleep 4321'"))


async def test_concurrency_is_inspects(env: Environment) -> None:
    alone = ["sh", "-c", "mkdir lock || exit 9; sleep 0.3; rmdir lock"]
    init_concurrency()  # no semaphore of an earlier test
    token = max_subprocesses_context_var.set(1)
    try:
        ends = await asyncio.gather(*(env.exec(alone) for _ in range(3)))
        assert [one.returncode for one in ends] == [0, 0, 0]
        ends = await asyncio.gather(*(env.exec(alone, concurrency=False) for _ in range(3)))
        assert sorted(one.returncode for one in ends) == [0, 9, 9]
    finally:
        max_subprocesses_context_var.reset(token)


# files


async def test_files_belong_to_the_default_user_and_keep_their_mode(env: Environment) -> None:
    who = (await env.exec(["id", "-un"])).stdout
    await env.write_file("new/deep/file", "#!/bin/sh\necho one\n")
    assert (await env.exec(["stat", "-c", "%U", "new", "new/deep", "new/deep/file"])).stdout == who * 3
    await env.exec(["chmod", "755", "new/deep/file"])
    await env.write_file("new/deep/file", b"#!/bin/sh\necho two\n")
    assert (await env.exec(["new/deep/file"])).stdout == "two\n"


async def test_names_and_text_stay_as_they_are(env: Environment) -> None:
    for name in ("-n", "two words", "a\nb", "ä", "$HOME", "~"):
        await env.write_file(name, f"{name}\r\n")
        assert await env.read_file(name) == f"{name}\r\n"
    await env.write_file("/tmp/binary", b"\xc3\x28")
    with pytest.raises(UnicodeDecodeError):
        await env.read_file("/tmp/binary")


async def test_what_a_path_is_at_fault_for(env: Environment) -> None:
    await env.write_file("file", "x")
    await env.exec(["mkfifo", "pipe"])
    for name in ("file/below", "x" * 300, "no/such/file", "y" * 5000):
        with pytest.raises(FileNotFoundError) as caught:
            await env.read_file(name)
        assert caught.value.filename == name
    for name in ("", ".", "/etc"):
        with pytest.raises(IsADirectoryError):
            await env.read_file(name)
    with pytest.raises(OSError, match="pipe") as other:
        await env.read_file("pipe")
    assert other.value.errno == errno.EINVAL
    with pytest.raises(NotADirectoryError):
        await env.write_file("file/below", "x")
    with pytest.raises(IsADirectoryError):
        await env.write_file(".", "x")


async def test_a_file_up_to_the_limit_is_whole(env: Environment) -> None:
    await env.write_file("file", "a" * 1024)
    with override_max_read_file_size(1024):
        assert await env.read_file("file") == "a" * 1024
        await env.exec(["sh", "-c", "printf a >> file"])
        with pytest.raises(OutputLimitExceededError):
            await env.read_file("file")


async def test_file_calls_have_no_more_rights_than_the_default_user(unprivileged: Environment) -> None:
    env = unprivileged
    await env.exec(
        ["sh", "-c", "umask 077; mkdir /secrets; echo answer > /secrets/a; echo answer > /tmp/b"], user="root"
    )
    await env.exec(["ln", "-s", "/tmp/b", "link"])
    await env.exec(["ln", "-s", "/etc/passwd", "accounts"])
    for name in ("/secrets/a", "/tmp/b", "link"):
        with pytest.raises(PermissionError) as caught:
            await env.read_file(name)
        assert caught.value.filename == name
    for name in ("/etc/new", "/new/file", "/tmp/b", "accounts"):
        with pytest.raises(PermissionError):
            await env.write_file(name, "x")
    assert "root" in await env.read_file("accounts")
    # What the user puts first on the image's PATH is not what reads for Inspect.
    await env.write_file("bin/head", "#!/bin/sh\necho planted\n")
    await env.exec(["chmod", "+x", "bin/head"])
    assert await env.read_file("bin/head") == "#!/bin/sh\necho planted\n"


# ends


async def test_a_sandbox_that_somebody_ended_is_no_failed_command(env: Environment) -> None:
    running = asyncio.ensure_future(env.exec(["sleep", "60"]))
    with Sandbox.connect(env._box.id) as box:
        await asyncio.sleep(0.2)
        box.kill()
    for call in (running, env.exec(["true"]), env.read_file("a"), env.write_file("a", "x")):
        with pytest.raises(SandboxGoneError) as caught:
            await call
        assert caught.value.cause == "killed"
        assert not isinstance(caught.value, SandboxUnavailableError | OSError | ValueError)


def test_only_memory_that_the_model_used_up_is_shown_to_it() -> None:
    def gone(cause: str) -> SandmillError:
        return SandboxGoneError("gone", details={"cause": cause})

    assert isinstance(_seen_by_inspect(gone("oom")), SandboxUnavailableError)
    for error in (gone("crashed"), gone("lease_expired"), gone("node_restarted"), TransportError("broke")):
        assert _seen_by_inspect(error) is error


async def test_a_start_that_fails_or_is_cancelled_leaves_nothing() -> None:
    with pytest.raises(SandmillError):
        await made(workdir="/etc/passwd/below")
    starting = [asyncio.ensure_future(made()) for _ in range(8)]
    await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    for one in starting:
        one.cancel()
    for done in await asyncio.gather(*starting, return_exceptions=True):
        if isinstance(done, Environment):
            await end(done)

    async def nothing_left() -> bool:
        return not left()

    await until(nothing_left)


async def test_cleaning_up_what_is_gone_is_quiet() -> None:
    environment = await made()
    await end(environment)
    await end(environment)
    assert left() == []


# configuration


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sandmill.yaml"
    file.write_text("image: host\nmemory_mb: 64\nnetwork: all\nenv: {A: b}\n")
    assert config_of(str(file)) == SandmillConfig(memory_mb=64, network="all", env={"A": "b"})
    file.write_text("")
    assert config_of(str(file)) == SandmillConfig() == config_of(None)
    for text, said in (
        ("memory: 5", "memory: Extra inputs"),
        ("cpu: -1", "cpu: "),
        ("workdir: here", "workdir: "),
        ("network: some", "network: "),
        ("- a", "holds no fields"),
        ("a: [", "can't be read"),
    ):
        file.write_text(text)
        with pytest.raises(PrerequisiteError) as caught:
            config_of(str(file))
        assert said in str(caught.value.message)
    with pytest.raises(PrerequisiteError):
        config_of(str(tmp_path / "none.yaml"))


def test_a_configuration_through_a_log() -> None:
    spec = resolve_sandbox_environment(("sandmill", SandmillConfig(memory_mb=64, env={"A": "b"})))  # type: ignore[arg-type]
    assert spec is not None
    again = SandboxEnvironmentSpec.model_validate(json.loads(spec.model_dump_json()))
    assert isinstance(again.config, SandmillConfig)
    assert {again, spec} == {spec}


async def test_a_configuration_reaches_the_sandbox() -> None:
    environment = await made(user="user", workdir="/work/here", memory_mb=64, env={"A": "b"}, network="all")
    try:
        said = await environment.exec(["sh", "-c", "pwd; id -un; stat -c %U .; echo $A"])
        assert said.stdout.split() == ["/work/here", "user", "user", "b"]
        info = environment._box.info
        assert (info.limits.memory_bytes, info.network) == (64 << 20, "all")
        assert info.metadata.items() >= {"client": "inspect", "task": "provider", "sample": "one"}.items()
    finally:
        await end(environment)


async def test_a_task_tells_a_mistake_before_its_first_sample() -> None:
    await Environment.task_init("startup", None)
    for wrong in (SandmillConfig(image="no-such-image"), SandmillConfig(user="nobody-knows"), "none.yaml"):
        with pytest.raises(PrerequisiteError):
            await Environment.task_init("startup", wrong)
    assert left() == []


# what a person sees


async def test_a_connection_names_the_sandbox_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = await made()
    try:
        said = await environment.connection(user="user")
        assert (said.type, said.container) == ("sandmill", environment._box.id)
        assert said.command.endswith(f"sandmill shell --workdir /root --user user {environment._box.id}")
        assert os.environ["SANDMILL_API_KEY"] not in said.command
        await environment._box.kill()
        with pytest.raises(ConnectionError):
            await environment.connection()
        monkeypatch.delenv("SANDMILL_API_URL")
        with pytest.raises(NotImplementedError):
            await environment.connection()
    finally:
        await end(environment)


async def test_the_command_line_ends_what_evals_left_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = await made(), await made()
    async with await AsyncSandbox.create(metadata={"client": "another"}) as other:
        await Environment.task_cleanup("shutdown", None, False)
        assert f"sandmill shell {one._box.id}" in capsys.readouterr().out
        await Environment.cli_cleanup(other.id)
        assert f"no eval's sandbox is called {other.id}" in capsys.readouterr().out
        await Environment.cli_cleanup(one._box.id)
        assert left() == [two._box.id]
        await Environment.cli_cleanup(None)
        assert left() == []
        assert (await other.run(["true"])).ok


# Inspect's own tools inside


async def test_inspects_injected_tools_run(env: Environment) -> None:
    command = ["sh", "-c", "id -un; echo err >&2; exit 4"]
    said = await SandboxEnvironmentProxy(env).exec_remote(command, stream=False)
    who = (await env.exec(["id", "-un"])).stdout
    assert (said.returncode, said.stdout, said.stderr) == (4, who, "err\n")

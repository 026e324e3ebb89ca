"""The command line without a server: help, mistakes, and what words mean."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from sandmill.cli import root
from sandmill.cli.copy import _remote
from sandmill.cli.live import exit_code
from sandmill.cli.options import command_of, environment, metadata
from sandmill.cli.output import result_as_json, size, span
from sandmill.errors import NodeError, PreparationError, SandboxGoneError, TransportError, UsageError
from sandmill.wire import Result

COMMANDS = list(root.COMMANDS)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server is configured, and none is looked for where a real one may run."""
    monkeypatch.delenv("SANDMILL_API_URL", raising=False)
    monkeypatch.delenv("SANDMILL_API_KEY", raising=False)
    monkeypatch.setattr("sandmill.cli.client.running_beside", lambda: None)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = root.run(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, name, "--help")
    assert code == 0
    assert "Example" in out
    assert f"sandmill {name}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "did you mean 'run'"),
        (["run"], "Missing argument"),
        (["run", "--nonsense", "true"], "no server is known"),
        (["kill"], "give SANDBOXES, or --all"),
        (["kill", "--all", "x"], "give SANDBOXES, or --all"),
        (["ls"], "no server is known"),
        (["cp", "a", "b"], "exactly one side"),
        (["create", "--metadata", "x"], "no server is known"),
        (["image", "import", "/nonexistent"], "does not exist"),
        (["serve", "--listen", "nonsense"], "HOST:PORT"),
        (["exec", "x", "true"], "no server is known"),
    ],
)
def test_mistakes_are_told(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandmill.cli.run.server_or_embedded", root.import_module("sandmill.cli.client").need_server)
    code, out, err = said(capsys, *words)
    assert code == root.MISTAKE
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_bug_is_told_without_a_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDMILL_DEBUG", raising=False)
    monkeypatch.setattr("sandmill.cli.manage.need_control", lambda: 1 / 0)
    code, _, err = said(capsys, "ls")
    assert code == root.FAILED
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (SandboxGoneError("x"), 125),
        (TransportError("x"), 125),
        (NodeError("x"), 125),
        (PreparationError("x"), 1),
    ],
)
def test_exit_codes_of_failures(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert root.complain(error) == code  # type: ignore[arg-type]
    assert capsys.readouterr().err == "error: x\n"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"exit_code": 0}, 0),
        ({"exit_code": 255}, 255),
        ({"exit_code": None, "signal": 11, "reason": "signaled"}, 139),
        ({"exit_code": None, "signal": 9, "reason": "timeout"}, 124),
        ({"exit_code": None, "signal": 9, "reason": "oom"}, 137),
    ],
)
def test_exit_codes_of_commands(fields: dict[str, object], code: int) -> None:
    assert exit_code(Result(pid=1, **fields)) == code  # type: ignore[arg-type]


def test_what_is_a_shell_line() -> None:
    assert command_of(["true"]) == ["true"]
    assert command_of(["/usr/bin/python3"]) == ["/usr/bin/python3"]
    assert command_of(["echo hello"]) == "echo hello"
    assert command_of(["a;b"]) == "a;b"
    assert command_of(["$X"]) == "$X"
    assert command_of(["echo", "a b; c"]) == ["echo", "a b; c"]


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "here")
    assert environment(["A=b=c", "OURS", "E="]) == {"A": "b=c", "OURS": "here", "E": ""}
    assert metadata(["a=b=c", "e="]) == {"a": "b=c", "e": ""}
    for wrong in ("NOT_SET_ANYWHERE", "=x"):
        with pytest.raises(click.BadParameter):
            environment([wrong])
    for wrong in ("x", "=x"):
        with pytest.raises(click.BadParameter):
            metadata([wrong])


def test_which_side_is_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:name").write_text("")
    assert _remote("i123:/a/b:c") == ("i123", "/a/b:c")
    assert _remote("builder:rel") == ("builder", "rel")
    for local in ("./a:b", "/a:b", "plain", "odd:name", "-"):
        assert _remote(local) is None


def test_numbers_for_people() -> None:
    assert [span(s) for s in (-5, 0.4, 119, 130, 7300, 200_000)] == ["0s", "0s", "119s", "2m", "2h", "2d"]
    assert [size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_a_result_as_json_loses_nothing() -> None:
    shape = result_as_json(Result(pid=1, exit_code=0, stdout=b"\xff\x00", stderr="é".encode()))
    assert (shape["stdout_base64"], shape["stderr"]) == ("/wA=", "é")
    assert "stderr_base64" not in shape


def test_the_version_needs_nothing() -> None:
    code = "import sys; sys.argv=['sandmill','--version']; from sandmill.cli import main; main();"
    code += "print(sorted({'click', 'asyncio', 'rich', 'sqlite3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("sandmill ")
    assert second == "[]"


def test_the_embedded_path_needs_no_option_parser() -> None:
    code = (
        "import sys; import sandmill.cli.embedded, sandmill.control.serve as s; s._import_the_rest();"
        "print(sorted({'click', 'rich', 'starlette', 'uvicorn', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

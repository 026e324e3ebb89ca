"""An agent for Harbor that tries each method of its environment; what is wrong becomes the trial's error."""

import os
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent

from sandmill import AsyncSandbox
from sandmill.errors import CommandTimeoutError, NotFoundError, TransportError


class ProbeAgent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "probe"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        await environment.exec("useradd -m -u 1234 somebody", user="root")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await commands(environment)
        await told(environment)
        with tempfile.TemporaryDirectory() as folder:
            await files(environment, Path(folder))


class CutOffAgent(ProbeAgent):
    """Its connection breaks once."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        sandbox = environment._running
        real = sandbox.run

        async def cut(*_: Any, **__: Any) -> None:
            sandbox.run = real
            raise TransportError("the connection broke")

        sandbox.run = cut
        await environment.exec("true")


class GoneAgent(ProbeAgent):
    """Its sandbox is ended by somebody else."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        other = await AsyncSandbox.connect(environment._running.id)
        await other.kill()
        await environment.exec("true")


async def commands(environment: Any) -> None:
    done = await environment.exec("pwd; echo $A $LANG; echo bad >&2; exit 3", env={"A": "b"})
    assert (done.stdout, done.stderr, done.return_code) == ("/app\nb C.UTF-8\n", "bad\n", 3), done
    assert (await environment.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
    assert (await environment.exec("id -u", user=1234)).stdout == "1234\n"
    with environment.with_default_user("somebody"):
        assert (await environment.exec("id -u")).stdout == "1234\n"
    assert (await environment.exec("kill -9 $$")).return_code == 137
    long = (await environment.exec("head -c 6000000 /dev/zero | tr '\\0' x")).stdout
    assert "bytes left out]" in long
    assert len(long) < 5_000_000
    late = None
    try:
        await environment.exec("echo so far; setsid sleep 77 & sleep 77", timeout_sec=1)
    except CommandTimeoutError as error:
        late = error.result
    assert late is not None, "no timeout"
    assert late.stdout == b"so far\n"
    assert (await environment.exec("pgrep -f 'sleep 7[7]'")).return_code == 1
    assert (await environment.exec("cat /proc/net/dev | grep -v lo: | wc -l")).stdout == "2\n"


async def told(environment: Any) -> None:
    pieces: list[tuple[str, str]] = []

    async def hear(text: str, stream: str) -> None:
        pieces.append((text, stream))

    with environment.scoped_output_callback(hear):
        done = await environment.exec("printf '\\303'; sleep 0.3; printf '\\244'; sleep 0.3; echo no >&2")
    assert pieces == [("ä", "stdout"), ("no\n", "stderr")], pieces
    assert (done.stdout, done.stderr) == ("ä", "no\n")


async def files(environment: Any, folder: Path) -> None:
    data = os.urandom(2_500_000)
    (folder / "up" / "sub").mkdir(parents=True)
    (folder / "up" / "sub" / "tool").write_bytes(data)
    (folder / "up" / "sub" / "tool").chmod(0o750)
    await environment.upload_file(folder / "up" / "sub" / "tool", "/new/place/tool")
    assert (await environment.exec("stat -c '%a %U' /new/place/tool")).stdout == "750 root\n"
    await environment.upload_dir(folder / "up", "/new/tree")
    await environment.exec("ln -s /etc/passwd /new/tree/link; mkfifo /new/tree/pipe; ln -s sub/tool /new/tree/inner")
    await environment.download_file("/new/place/tool", folder / "down" / "tool")
    assert (folder / "down" / "tool").read_bytes() == data
    await environment.download_dir("/new/tree", folder / "tree")
    found = sorted(str(path.relative_to(folder / "tree")) for path in (folder / "tree").rglob("*"))
    assert found == ["sub", "sub/tool"], found
    await environment.download_dir_with_exclusions(source_dir="/new", target_dir=folder / "some", exclude=["tree"])
    assert (folder / "some" / "place" / "tool").read_bytes() == data
    try:
        await environment.download_file("/not/there", folder / "nothing")
    except NotFoundError:
        assert not (folder / "nothing").exists()
    else:
        raise AssertionError("downloaded what isn't there")

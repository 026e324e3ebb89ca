"""Images from Dockerfiles, on images that Debian's own tools made: layers, caching, stages, owners, failures, and a task."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandmill import Sandbox, SandmillError, UsageError
from sandmill.builds import BuildError, Built, DockerfileError, build
from sandmill.sdk.configuration import Server as Address
from sandmill.sdk.control import Control

from .conftest import Server, start_server, temporary_server
from .images import image

pytestmark = pytest.mark.usefixtures("bases")


@pytest.fixture(scope="module")
def control(server: Server) -> Iterator[Control]:
    made = Control(Address(server.api_url, server.api_key))
    yield made
    made.close()


@pytest.fixture(scope="module")
def imported(control: Control) -> Iterator[None]:
    """The images that FROM lines name."""
    names = {"builds/busybox:1": "busybox", "builds/debian:12": "debian", "builds/static": "static"}
    for name, recipe in names.items():
        control.import_image(str(image(recipe)), name)
    yield
    # What was built, too: an image of the same content under another name would no longer be the only one of it.
    for name in [name for one in control.images() for name in one.names if name.startswith("builds/")]:
        control.remove_image(name)


@pytest.fixture
def bases(imported: None, client_environment: Server) -> None:
    """The images, and this process's SDK pointed at the server."""


class Said:
    """What a build said."""

    def __init__(self) -> None:
        self.data = b""
        self.seen: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        self.data += data
        self.seen.append(data)

    @property
    def text(self) -> str:
        return self.data.decode()


def make(folder: Path, dockerfile: str, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def output(built: Built, command: str, **how: str) -> str:
    with Sandbox(built.image) as box:
        return box.run(command, check=True, **how).text  # type: ignore[arg-type]


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    text = (
        "FROM builds/busybox:1\nUSER root\nRUN cat /proc/sys/kernel/random/uuid > /stamp\nCOPY a /a\nRUN cat /a > /b\n"
    )
    context = make(tmp_path, text, a="1")
    first = build(context)
    assert (first.layers, first.cached) == (3, 0)
    again = build(context)
    assert (again.image, again.id, again.cached) == (first.image, first.id, 3)
    (context / "a").write_text("2")
    changed = build(context)
    assert changed.cached == 1
    assert output(changed, "cat /stamp") == output(first, "cat /stamp")
    assert output(changed, "cat /b") == "2"
    (context / "a").chmod(0o755)
    assert build(context).cached == 1
    anew = build(context, no_cache=True)
    assert anew.cached == 0
    assert output(anew, "cat /stamp") != output(first, "cat /stamp")


def test_configuration_makes_no_layer_anew(tmp_path: Path, control: Control) -> None:
    text = "FROM builds/debian:12\nLABEL one=1\nRUN true > /x\n"
    build(make(tmp_path, text))
    more = f"""{text}LABEL two="2 $GREETING" three=3
ENV PATH=/opt/bin:$PATH A=1
WORKDIR sub
USER user
VOLUME ["/data"]
ENTRYPOINT ["/bin/entry"]
CMD run it
EXPOSE 80
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s CMD true
"""
    built = build(make(tmp_path, more), name="builds/configured")
    assert (built.layers, built.cached) == (2, 1)
    config = control.image("builds/configured").config
    assert config.labels == {"one": "1", "two": "2 hello world", "three": "3"}
    assert (config.entrypoint, config.cmd, config.volumes) == (["/bin/entry"], ["/bin/sh", "-c", "run it"], ["/data"])
    with Sandbox("builds/configured") as box:
        assert box.run("pwd; id -un; echo $A; echo $PATH").text.split("\n")[:3] == ["/work/sub", "user", "1"]
        assert box.run("echo $PATH").text.startswith("/opt/bin:/usr/local/sbin:")
    # Of an image that is built from it an ENTRYPOINT takes the inherited CMD away.
    child = build(make(tmp_path / "child", 'FROM builds/configured\nENTRYPOINT ["/other"]\n'))
    config = control.image(child.image).config
    assert (config.entrypoint, config.cmd, config.labels["one"]) == (["/other"], [], "1")
    control.remove_image("builds/configured")


def test_stages(tmp_path: Path, control: Control) -> None:
    text = """
FROM builds/debian:12 AS compile
WORKDIR /src
COPY main.py .
RUN mkdir out && python3 -c 'open("out/made.txt", "w").write("made")' && ln -s made.txt out/link \
    && touch out/b.txt && chmod 750 out/made.txt && chown 5:6 out/made.txt && touch -d @1000000000 out/b.txt
FROM builds/busybox:1 AS never
RUN exit 1
FROM builds/busybox:1 AS base
USER root
RUN echo base > /base
FROM base
COPY --from=compile /src/out /all
COPY --from=0 /src/out/*.txt /some/
COPY --from=COMPILE --chown=user:7 --chmod=640 /src/out/made.txt /single
COPY --from=builds/static /hello /bin/
RUN hello && cat /base
"""
    said = Said()
    built = build(make(tmp_path, text, main_DOT_py="x"), on_output=said)
    assert "exit 1" not in said.text
    lines = output(
        built, "stat -c '%n %u:%g %a %F' /all/* /some/* /single; stat -c %Y /all/b.txt", user="root"
    ).splitlines()
    assert lines == [
        "/all/b.txt 0:0 644 regular empty file",
        "/all/link 0:0 777 symbolic link",
        "/all/made.txt 5:6 750 regular file",
        "/some/b.txt 0:0 644 regular empty file",
        "/some/made.txt 5:6 750 regular file",
        "/single 1000:7 640 regular file",
        "1000000000",
    ]
    # busybox and its layers lie under it; the compiler's don't.
    layers = control.image(built.image).layers
    assert control.image("builds/busybox:1").layers[0] == layers[0]
    assert control.image("builds/debian:12").layers[0] not in layers
    target = build(tmp_path, target="base")
    assert output(target, "cat /base") == "base\n"
    with pytest.raises(UsageError, match="no stage 'nope'"):
        build(tmp_path, target="nope")


def test_scratch_holds_what_is_copied_and_nothing_else(tmp_path: Path) -> None:
    built = build(
        make(
            tmp_path,
            'FROM scratch\nCOPY --from=builds/static /hello /bin/\nCOPY a /\nENTRYPOINT ["/bin/hello"]\n',
            a="a",
        )
    )
    with Sandbox(built.image) as box:
        assert box.run(["/bin/hello"]).text.startswith("hello from /bin/hello, uid 0")
        assert (
            {"bin", "a"}
            <= {entry.name for entry in box.files.list("/")}
            <= {"bin", "a", "dev", "proc", "sys", "etc", "tmp"}
        )


def test_copies(tmp_path: Path) -> None:
    text = """
FROM builds/debian:12
USER user
WORKDIR /home/user/app
COPY --chown=user:user one.txt .
COPY one.txt two.txt to/
COPY sub renamed
COPY --chmod=755 one.txt /opt/new/name
COPY one.txt /etc
COPY ["sub/with space.txt", "/opt/"]
COPY --chown=1000:4 <<EOF "<<'RAW'" /opt/docs/
hello $NAME ${NAME:-nobody}
EOF
RAW stays $NAME
RAW
ADD arch.tar.gz /opt/arch
COPY arch.tar.gz /opt/
"""
    text = text.replace("\"<<'RAW'\"", "<<'RAW'")
    context = make(tmp_path, text, one_DOT_txt="1", two_DOT_txt="2", sub__in_DOT_txt="in", sub__skip_DOT_log="log")
    (context / "sub" / "with space.txt").write_text("space")
    (context / ".dockerignore").write_text("**/*.log\n")
    (context / "inside").write_text("inside")
    subprocess.run(
        ["tar", "-C", str(context), "--owner=9", "--group=8", "-czf", str(context / "arch.tar.gz"), "inside"],
        check=True,
    )
    built = build(context)
    found = output(built, "cd /home/user && find . /opt -type f -printf '%p %U:%G %m\\n' | sort", user="root")
    assert "./app/one.txt 1000:1000 644" in found
    assert "./app/to/two.txt 0:0 644" in found
    assert "./app/renamed/in.txt 0:0 644" in found
    assert "skip.log" not in found
    assert "/opt/new/name 0:0 755" in found
    assert "/opt/with space.txt 0:0 644" in found
    assert "/opt/docs/EOF 1000:4 644" in found
    assert "/opt/arch/inside 9:8 644" in found
    assert "/opt/arch.tar.gz 0:0 644" in found
    assert output(built, "cat /etc/one.txt /opt/docs/*; stat -c %U .") == "1hello  nobody\nRAW stays $NAME\nuser\n"


def test_a_copy_follows_links_of_the_image(tmp_path: Path) -> None:
    text = "FROM builds/busybox:1\nUSER root\nRUN mkdir -p /real/x && ln -s /real /link && ln -s /real/x /real/dir\n"
    built = build(make(tmp_path, f"{text}COPY a /link/b\nCOPY tree /real\n", a="a", tree__dir__c="c"))
    assert output(built, "cat /real/b /real/x/c; readlink /link") == "ac/real\n"


def test_long_names_hard_links_and_attributes_are_taken_from_a_stage(tmp_path: Path) -> None:
    long = f"{'d' * 120}/{'f' * 120}"
    text = f"""
FROM builds/debian:12 AS one
RUN mkdir -p /out/{long.split("/")[0]} && echo long > /out/{long} && ln /out/{long} /out/same \\
    && cp /bin/true /out/able && setcap cap_net_raw+ep /out/able && mkdir -m 1777 /out/sticky
FROM builds/debian:12
COPY --from=one /out /deep/er/
"""
    built = build(make(tmp_path, text))
    command = f"cd /deep/er && cat {long} && stat -c %h {long} same && stat -c %a sticky && getcap able"
    assert output(built, command, user="root") == "long\n2\n2\n1777\nable cap_net_raw=ep\n"


def test_a_command_that_nobody_wants_any_more_is_ended(tmp_path: Path) -> None:
    unwanted = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            build(context, on_output=lambda data: unwanted.set() if b"silent" in data else None, cancelled=unwanted)
        except SandmillError as error:
            failed.append(error)

    context = make(tmp_path, "FROM builds/busybox:1\nRUN echo silent now; sleep 300\n")
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [error.code for error in failed] == ["cancelled"]  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60  # the server waits a while for another who asks for the same
    while [view for view in Sandbox.list() if "sandmill.preparation" in view.metadata]:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_server_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    """Killed in the middle of a command: the layers before it are there, the command is run anew by the next server."""
    with temporary_server() as first:
        control = Control(Address(first.api_url, first.api_key))
        control.import_image(str(image("busybox")), "base")
        control.close()
        context = make(tmp_path, "FROM base\nUSER root\nRUN echo one > /one\nRUN echo begun; sleep 2; echo done\n")
        port = first.api_url.rpartition(":")[2]
        again: list[Server] = []

        def listen(data: bytes) -> None:
            if b"begun" in data and not again:
                first.stop(signal.SIGKILL)
                again.append(start_server(first.state_dir, "--listen", f"127.0.0.1:{port}"))

        try:
            built = build(context, on_output=listen, api_url=first.api_url, api_key=first.api_key)
            assert (built.layers, built.cached) == (2, 0)
            with Sandbox(built.image, api_url=first.api_url, api_key=first.api_key) as box:
                assert box.run("cat /one").text == "one\n"
        finally:
            for server in again:
                server.stop()


def test_missing_sources_are_said_before_anything_runs(tmp_path: Path) -> None:
    stages = ("AS never\nCOPY c /", "AS one\nCOPY a /")
    text = "".join(f"FROM builds/busybox:1 {stage}\n" for stage in stages) + "FROM one\nRUN echo ran\nCOPY b* /\n"
    said = Said()
    with pytest.raises(DockerfileError) as failed:
        build(make(tmp_path, text), on_output=said)
    assert [line for line, _ in failed.value.details["problems"]] == [4, 7]
    assert said.text == ""


def test_arg_and_env(tmp_path: Path) -> None:
    text = """
ARG BASE=nothing
ARG SHARED=outer
FROM builds/$BASE AS one
ARG SHARED
ARG OWN=own-${SHARED}
ARG PLAIN
ENV KEPT=$OWN OWN2=${OWN:-x}
RUN echo "1 $SHARED $OWN $KEPT [$PLAIN] [$BASE]" >> /tmp/said
FROM one
ARG TARGETARCH
RUN echo "2 $OWN $KEPT ${TARGETARCH:-none}" >> /tmp/said
FROM builds/$BASE
RUN echo "3 [$SHARED$KEPT]" >> /tmp/said
COPY --from=1 /tmp/said /tmp/other
"""
    context = make(tmp_path, text)
    arch = {"x86_64": "amd64", "aarch64": "arm64"}
    built = build(context, build_args={"BASE": "busybox:1", "PLAIN": "p", "UNUSED": "u"})
    assert built.warnings == ("no ARG takes the build argument UNUSED",)
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    lines = output(built, "cat /tmp/other /tmp/said").splitlines()
    own = "own-outer"
    assert lines == [
        f"1 outer {own} {own} [p] []",
        f"2 {own} {own} {arch.get(machine, machine)}",
        "3 []",
    ]
    assert output(built, 'echo "[$OWN$PLAIN]"') == "[]\n"
    other = build(context, build_args={"BASE": "busybox:1", "PLAIN": "q"})
    assert other.id != built.id


def test_forms_of_run(tmp_path: Path) -> None:
    text = r"""
FROM builds/debian:12
RUN ["python3", "-c", "import sys; print(repr(sys.argv))", "$HOME", "a b"]
RUN echo $0 \
    # a comment within
    && echo "con""tinued"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN echo $0; [[ a == a ]] && echo bash
RUN <<EOF
x=1
echo "heredoc $x"
EOF
RUN <<EOF
#!/usr/bin/env python3
print("a program of", __file__)
EOF
RUN cat <<A - <<'B'
first
A
second $x
B
USER user
RUN id -un; echo $HOME
RUN ls /dev/shm; test ! -e /dev/shm/sandmill-script
"""
    said = Said()
    build(make(tmp_path, text), on_output=said)
    lines = [line for line in said.text.splitlines() if not line.startswith(("Dockerfile:", "  "))]
    assert lines == [
        "['-c', '$HOME', 'a b']",
        "/bin/sh",
        "continued",
        "/bin/bash",
        "bash",
        "heredoc 1",
        "a program of /dev/shm/sandmill-script",
        "second $x",
        "user",
        "/home/user",
    ]


def test_output_comes_as_it_is_written(tmp_path: Path) -> None:
    """The command ends only when its first words have been seen."""
    seen = threading.Event()

    def listen(data: bytes) -> None:
        if b"first words" in data:
            seen.set()

    text = "FROM builds/busybox:1\nRUN echo first words; sleep 2; echo last\n"
    ended = threading.Thread(target=lambda: build(make(tmp_path, text), on_output=listen, no_cache=True))
    ended.start()
    assert seen.wait(30)
    assert ended.is_alive()
    ended.join(30)


def test_two_who_build_the_same_build_it_once(tmp_path: Path) -> None:
    context = make(
        tmp_path, "FROM builds/busybox:1\nRUN sleep 1; cat /proc/sys/kernel/random/uuid > /tmp/stamp; echo said\n"
    )
    made: list[tuple[Built, Said]] = []

    def one() -> None:
        said = Said()
        made.append((build(context, on_output=said), said))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({built.id for built, _ in made}) == 1
    assert all("said" in said.text for built, said in made if not built.cached)


def test_a_failed_command_says_line_command_and_output(tmp_path: Path) -> None:
    text = "FROM builds/busybox:1\n\nRUN echo fine\nRUN echo it broke; \\\n  echo why >&2; exit 7\nRUN echo never\n"
    said = Said()
    with pytest.raises(BuildError) as failed:
        build(make(tmp_path, text), name="builds/none", on_output=said)
    error = failed.value
    assert error.message.startswith("Dockerfile:4: RUN echo it broke; echo why >&2; exit 7: ended with 7\n")
    assert "\n  it broke" in error.message
    assert "\n  why" in error.message
    assert (error.details["line"], error.details["exit_code"]) == (4, 7)
    assert "never" not in said.text
    assert not [view for view in Sandbox.list() if "sandmill.preparation" in view.metadata]


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("COPY missing /x", DockerfileError, "missing is not in the context"),
        ("COPY ../x /x", DockerfileError, "outside of the context"),
        ("COPY --from=no/such:image /a /b", BuildError, "no image"),
        ("COPY --from=builds/static /nothing /b", BuildError, "/nothing is not there"),
        ("COPY --chown=nobody-here a /b", BuildError, "no user"),
        ("USER nobody-here\nRUN true", BuildError, "no user"),
        ('RUN ["/no/such/program"]', BuildError, "/no/such/program"),
        ('ENV a="${b:?say b}"', DockerfileError, "say b"),
        ("FROM --platform=windows/amd64 builds/static", DockerfileError, "windows/amd64"),
        ("FROM none/such:1", BuildError, "no image"),
    ],
)
def test_failures_have_their_line(tmp_path: Path, line: str, kind: type[Exception], said: str) -> None:
    context = make(tmp_path, f"FROM builds/busybox:1\n{line}\n", a="a")
    with pytest.raises(kind, match=re.escape(said)) as failed:
        build(context)
    assert re.match(r"Dockerfile:[23]: ", str(failed.value))


def test_nothing_runs_if_the_file_is_wrong(tmp_path: Path) -> None:
    said = Said()
    with pytest.raises(DockerfileError, match="2 problems"):
        build(make(tmp_path, "FROM builds/busybox:1\nRUN echo a\nONBUILD RUN x\nADD http://a/b /c\n"), on_output=said)
    assert said.text == ""


def test_network_is_there_unless_refused(tmp_path: Path) -> None:
    context = make(tmp_path, "FROM builds/busybox:1\nRUN ip -o link | wc -l\nRUN --network=none ip -o link | wc -l\n")
    seen = []
    for network in ("all", "none"):
        said = Said()
        build(context, network=network, on_output=said, no_cache=True)
        seen += [line for line in said.text.splitlines() if line.isdigit()]
    assert seen == ["2", "1", "1", "1"]


def test_the_command_line(tmp_path: Path, server: Server) -> None:
    context = make(tmp_path, "ARG W\nFROM builds/busybox:1\nARG W\nRUN echo said $W; test $W = ok\n")

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "sandmill.cli", *words]
        return subprocess.run(
            line, env=server.environment | {"W": "ok"}, capture_output=True, text=True, check=False, timeout=120
        )

    done = command("image", "build", str(context), "-t", "builds/cli", "--build-arg", "W")
    assert (done.returncode, done.stdout) == (0, "builds/cli\n"), done.stderr
    assert "Dockerfile:4 RUN echo said $W; test $W = ok\nsaid ok\n" in done.stderr
    again = command("image", "build", str(context), "-t", "builds/cli", "--build-arg", "W=ok", "--json")
    assert json.loads(again.stdout)["cached"] == 1
    failed = command("image", "build", str(context), "--build-arg", "W=bad")
    assert failed.returncode == 1
    assert "error: Dockerfile:4: RUN echo said $W; test $W = ok: ended with 1" in failed.stderr
    (context / "Dockerfile").write_text("FROM\nONBUILD x\n")
    wrong = command("image", "build", str(context))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Dockerfile:1:" in wrong.stderr
    assert "Dockerfile:2:" in wrong.stderr
    assert "Traceback" not in failed.stderr + wrong.stderr
    assert command("image", "rm", "builds/cli").returncode == 0


def test_a_task_with_only_a_dockerfile(tmp_path: Path, server: Server) -> None:
    task = tmp_path / "tasks" / "count-words"
    files = {
        "instruction.md": "Write the number of words of /app/text.txt into /app/count.txt.",
        "task.toml": "[agent]\ntimeout_sec = 60\n[environment]\nmemory_mb = 256\n",
        "environment/Dockerfile": "FROM builds/debian:12 AS words\nRUN printf 'one two\\nthree' > /text\n\n"
        "FROM builds/debian:12\nENV WHERE=/app/count.txt\nWORKDIR /app\nCOPY --from=words /text text.txt\nCOPY . .\n"
        "RUN chown -R user . && test $(wc -l < /proc/net/dev) = 4\nUSER user\n",
        "environment/notes.txt": "copied",
        "solution/solve.sh": "#!/bin/bash\ntest -f notes.txt && wc -w < text.txt > $WHERE\n",
        "tests/test.sh": "#!/bin/bash\nr=0; grep -qx 3 /app/count.txt && r=1; echo $r > /logs/verifier/reward.txt\n",
    }
    for name, content in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(content)
    words = ["eval", str(tmp_path / "tasks"), "--agent", "oracle", "--agent", "nop", "-k", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "sandmill.cli", *words, "--out", str(tmp_path / "out")],
        env=server.environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["agent"]: row["reward_mean"] for row in json.loads(done.stdout)["totals"]} == {
        "oracle": 1.0,
        "nop": 0.0,
    }
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("RUN echo words of woe; exit 3\n")
    failed = subprocess.run(
        [sys.executable, "-m", "sandmill.cli", *words, "--out", str(tmp_path / "failed")],
        env=server.environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert failed.returncode == 3
    error = json.loads((tmp_path / "failed" / "records.jsonl").read_text().splitlines()[0])["error"]
    assert error["type"] == "preparation"
    assert "Dockerfile:11: RUN echo words of woe; exit 3: ended with 3\n  words of woe" in error["message"]

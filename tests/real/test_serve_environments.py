"""Prepared environments on the real node: once for all, shared, failures with their step."""

import base64
import io
import tarfile
import threading

import pytest

from sandmill import PreparationError, Sandbox
from sandmill.sdk.sandbox import prepare

from .conftest import Server

pytestmark = pytest.mark.usefixtures("client_environment")


def tar_of(files: dict[str, bytes]) -> str:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return base64.b64encode(sink.getvalue()).decode()


def test_steps_become_a_layer_that_sandboxes_share() -> None:
    steps = [
        {"copy": {"/opt/in/hello.txt": base64.b64encode(b"hello").decode()}},
        {"tar": tar_of({"tool": b"#!/bin/sh\necho tool ran\n"}), "to": "/opt/bin"},
        {"run": 'tr a-z A-Z < /opt/in/hello.txt > /opt/out.txt; echo "$GREETING in $PWD" > /opt/where.txt'},
    ]
    image = prepare("host", steps, env={"GREETING": "hi"}, workdir="/work", network="none")
    assert prepare("host", steps, env={"GREETING": "hi"}, workdir="/work", network="none") == image
    with Sandbox(image) as one, Sandbox(image) as two:
        one.files.write("/opt/out.txt", "changed")
        assert two.files.read("/opt/out.txt") == b"HELLO"
        assert two.files.read("/opt/where.txt") == b"hi in /work\n"
        assert two.run("/opt/bin/tool; pwd; echo $GREETING").stdout == b"tool ran\n/work\nhi\n"


def test_many_ask_and_one_prepares(server: Server) -> None:
    found: list[str] = []
    steps = [{"run": "date +%s%N > /stamp; sleep 0.3"}]
    threads = [threading.Thread(target=lambda: found.append(prepare("host", steps, network="none"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6
    assert len(set(found)) == 1


def test_a_failed_step_is_shown_and_leaves_nothing() -> None:
    with pytest.raises(PreparationError) as failed:
        prepare("host", [{"run": "true"}, {"run": "echo to stdout; echo to stderr >&2; exit 7"}], network="none")
    details = failed.value.details
    assert (details["step"], details["exit_code"]) == (1, 7)
    assert (details["stdout"], details["stderr"]) == ("to stdout\n", "to stderr\n")
    assert not [view for view in Sandbox.list() if "sandmill.preparation" in view.metadata]


def test_what_is_not_base64_or_not_there() -> None:
    with pytest.raises(Exception, match="base64"):
        prepare("host", [{"copy": {"/x": "!"}}])
    with pytest.raises(Exception, match="no-such-image"):
        prepare("no-such-image", [{"run": "true"}])

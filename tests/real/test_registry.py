"""Images from registries: a real one, and one that misbehaves."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandmill import Sandbox
from sandmill.errors import ImageError, NotFoundError, SandmillError, UsageError
from sandmill.sdk.configuration import Server as Address
from sandmill.sdk.control import Control
from sandmill.wire import Collection

from .conftest import Server, temporary_server
from .images import image
from .registry import Proxy, Registry, first, layout, proxy, registry, token_server

LOGIN = ("someone", "s3cret")
BUSYBOX = Path("/usr/bin/busybox")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry with a small image of ten layers, `many:1`; the last of them is large enough to be cut."""
    place = tmp_path_factory.mktemp("registry")
    noise = os.urandom(2_000_000)
    layers = [{"bin/busybox": BUSYBOX.read_bytes(), "bin/sh": BUSYBOX.read_bytes()}]
    layers += [{f"files/{n}": str(n).encode()} for n in range(8)]
    layers += [{"noise": noise, "files/7": b"over"}]
    with registry(place / "r") as made:
        made.push(layout(place / "many", layers), "many:1")
        made.push(layout(place / "both", layers[:2], platforms=("s390x", "amd64")), "both:1", "--all")
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With no logins of the machine, and a credential helper that knows `helped.test`."""
    home = tmp_path_factory.mktemp("home")
    before = dict(os.environ)
    os.environ["DOCKER_CONFIG"] = str(home)
    os.environ["PATH"] = f"{home}:{os.environ['PATH']}"
    try:
        with temporary_server() as made:
            yield made
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def control(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """Without pulled images, before and after."""
    monkeypatch.setenv("SANDMILL_API_URL", server.api_url)
    monkeypatch.setenv("SANDMILL_API_KEY", server.api_key)
    made = Control(Address(server.api_url, server.api_key))
    made.collect_images(Collection(all=True, imported=True))
    yield made
    made.collect_images(Collection(all=True, imported=True))
    assert [one.names for one in made.images()] == [["host"]]
    made.close()


@pytest.fixture
def between(origin: Registry) -> Iterator[Proxy]:
    with proxy(origin) as made:
        yield made


def blobs(path: str) -> bool:
    return "/blobs/" in path


def test_an_image_is_pulled_when_a_sandbox_asks_for_it(control: Control, between: Proxy) -> None:
    name = f"{between.host}/many:1"
    with pytest.raises(NotFoundError, match="there is no image"):
        Sandbox(image=name, pull="never")
    with Sandbox(image=name) as box:
        assert box.run("/bin/busybox cat /files/0 /files/7 /etc/arch").stdout == b"0overamd64"
    once = between.count("/blobs/")
    assert once == 11, "ten layers and the configuration"
    with Sandbox(image=name) as box:
        assert box.run("/bin/busybox stat -c %s /noise").stdout == b"2000000\n"
    assert between.count("/blobs/") == once
    with Sandbox(image=name, pull="always") as box:
        box.run(["/bin/busybox", "true"], check=True)
    assert between.count("/manifests/") == 2
    assert between.count("/blobs/") == once + 1, "the configuration; no layer twice"


def test_many_who_ask_cause_one_pull(control: Control, between: Proxy) -> None:
    name = f"{between.host}/many:1"

    def one(_: int) -> bytes:
        with Sandbox(image=name) as box:
            return box.run("/bin/busybox cat /files/0").stdout

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(one, range(20))) == {b"0"}
    assert between.count("/blobs/") == 11
    assert control.pulls() == []


def test_names_are_docker_s(control: Control, origin: Registry) -> None:
    pulled = control.pull_image(f"{origin.host}/both:1")
    with Sandbox(image=f"{origin.host}/both:1") as box:
        assert box.run("/bin/busybox cat /etc/arch").stdout == b"amd64", "of this machine"
    for bad in ("UPPER/case", "two words", "a@sha256:12"):
        with pytest.raises(UsageError):
            control.pull_image(bad)
    with pytest.raises(NotFoundError, match="manifests/2") as caught:
        control.pull_image(f"{origin.host}/both:2")
    assert caught.value.code == "image_not_found"
    assert pulled.names == [f"{origin.host}/both:1"]


def test_by_digest(control: Control, origin: Registry) -> None:
    inspected = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", f"docker://{origin.host}/many:1"], check=True, capture_output=True
    )
    name = f"{origin.host}/many@{json.loads(inspected.stdout)['Digest']}"
    assert control.pull_image(name).names == [name]
    with Sandbox(image=name) as box:
        assert box.run("/bin/busybox cat /files/3").stdout == b"3"


def test_a_login_is_wanted(control: Control, server: Server, tmp_path: Path) -> None:
    home = Path(os.environ["DOCKER_CONFIG"])
    with registry(tmp_path / "r", login=LOGIN) as private:
        name = private.push(image("busybox", "oci"), "private:1")
        with pytest.raises(ImageError) as caught:
            control.pull_image(name)
        assert caught.value.code == "image_auth"
        assert "login" in (caught.value.hint or "")
        with pytest.raises(ImageError, match="401"):
            control.pull_image(name, credentials={"username": LOGIN[0], "password": "wrong"})
        control.pull_image(name, credentials={"username": LOGIN[0], "password": LOGIN[1]})
        control.remove_image(name)
        try:
            login = base64.b64encode(":".join(LOGIN).encode()).decode()
            (home / "config.json").write_text(json.dumps({"auths": {private.host: {"auth": login}}}))
            control.pull_image(name)
            control.remove_image(name)
            helper = home / "docker-credential-test"
            answer = json.dumps({"ServerURL": private.host, "Username": LOGIN[0], "Secret": LOGIN[1]})
            helper.write_text(f"#!/bin/sh\nread host\n[ \"$host\" = {private.host} ] && echo '{answer}'\n")
            helper.chmod(0o755)
            (home / "config.json").write_text(json.dumps({"credHelpers": {private.host: "test"}}))
            control.pull_image(name)
        finally:
            (home / "config.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "sandmill.cli", "image", "pull", name, "-u", LOGIN[0], "--password-stdin"]
        control.remove_image(name)
        done = subprocess.run(
            command, input=LOGIN[1] + "\n", text=True, env=server.environment, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
        logged = (server.state_dir / "noded.log").read_text()
        assert LOGIN[1] not in logged + done.stderr


def test_tokens(control: Control, tmp_path: Path) -> None:
    with token_server(tmp_path / "t", LOGIN) as (auth, scopes), registry(tmp_path / "r", auth=auth) as private:
        private.login = LOGIN
        name = private.push(image("busybox", "oci"), "team/private:1")
        scopes.clear()
        with pytest.raises(ImageError) as caught:
            control.pull_image(name)
        assert caught.value.code == "image_auth"
        control.pull_image(name, credentials={"username": LOGIN[0], "password": LOGIN[1]})
        assert set(scopes) == {"repository:team/private:pull"}
        assert len(scopes) == 2, "one token for the whole image"


def test_a_registry_that_asks_to_wait_is_left_alone_as_long(control: Control, between: Proxy) -> None:
    between.faults.append(first(1, 429, part="/manifests/", Retry_After="1"))
    between.faults.append(first(2, 503, part="/blobs/"))
    control.pull_image(f"{between.host}/many:1")
    asked = [one.at for one in between.seen if "/manifests/" in one.path]
    assert asked[1] - asked[0] >= 1.0


def test_one_that_wants_too_much_patience_is_an_error(control: Control, between: Proxy) -> None:
    between.faults.append(first(1000, 429, Retry_After="7200"))
    with pytest.raises(ImageError, match="429") as caught:
        Sandbox(image=f"{between.host}/many:1")
    assert (caught.value.code, caught.value.retryable) == ("image_rate_limited", True)
    assert "7200 s" in (caught.value.hint or "")
    assert len(between.seen) == 1


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no-ranges"])
def test_a_cut_download_goes_on(control: Control, between: Proxy, ranges: bool) -> None:
    between.ranges = ranges
    between.cut_after_bytes = 300_000
    name = f"{between.host}/many:1"
    control.pull_image(name)
    assert between.cut_after_bytes is None, "one was cut"
    again = [one for one in between.seen if one.range is not None]
    assert len(again) == 1
    assert int(again[0].range.removeprefix("bytes=").removesuffix("-")) > 0  # type: ignore[union-attr]
    with Sandbox(image=name) as box:
        assert box.run("/bin/busybox stat -c %s /noise").stdout == b"2000000\n"


def test_changed_content_is_refused(control: Control, between: Proxy) -> None:
    def spoil(path: str, body: bytes) -> bytes:
        return body[:-1000] + bytes(1000) if "/blobs/" in path and len(body) > 1_000_000 else body

    between.body = spoil
    with pytest.raises(SandmillError) as caught:
        control.pull_image(f"{between.host}/many:1")
    assert caught.value.code in ("image_digest_mismatch", "image_malformed")
    assert all(not one.names or one.names == ["host"] for one in control.images())
    between.body = lambda path, body: body + b" " if "/manifests/" in path else body
    with pytest.raises(ImageError, match="digest"):
        control.pull_image(f"{between.host}/many:1")


def test_a_registry_that_is_away(control: Control) -> None:
    with pytest.raises(ImageError, match=r"there is no image .* here, and it can't be pulled") as caught:
        Sandbox(image="127.0.0.1:9/x")
    assert (caught.value.code, caught.value.retryable) == ("registry_unavailable", True)


def test_nobody_waits_any_more(control: Control, between: Proxy, server: Server) -> None:
    """The pull ends with the last who asked for it, and nothing of it is left."""
    held, gone = threading.Event(), threading.Event()

    def hold(handler: object) -> bool:
        held.set()
        gone.wait(20)
        return False

    between.faults.append(hold)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "sandmill.cli", "image", "pull", f"{between.host}/many:1"]
    client = subprocess.Popen(command, env=server.environment, stderr=subprocess.DEVNULL)
    assert held.wait(10)
    assert len(control.pulls()) == 1
    client.kill()
    client.wait()
    deadline = 100
    while control.pulls() and deadline:
        deadline -= 1
        threading.Event().wait(0.1)
    gone.set()
    assert control.pulls() == []


def test_mirrors(origin: Registry, between: Proxy, tmp_path: Path) -> None:
    """The first that is away is passed over; what a mirror has is not asked of the origin."""
    conf = tmp_path / "registries.conf"
    conf.write_text(
        f'[[registry]]\nprefix = "some.example/team"\nlocation = "127.0.0.1:9/nowhere"\n'
        f'[[registry.mirror]]\nlocation = "127.0.0.1:9"\n[[registry.mirror]]\nlocation = "{between.host}"\ninsecure = true\n'
    )
    with temporary_server("--registries", str(conf)) as server:
        control = Control(Address(server.api_url, server.api_key))
        assert control.pull_image("some.example/team/many:1").names == ["some.example/team/many:1"]
        assert between.count("/v2/many/blobs/") == 11
        with pytest.raises(ImageError, match=r"a mirror: .*404"):
            control.pull_image("some.example/team/none:1")
        conf.write_text("[[registry]\n")
        with pytest.raises(SandmillError, match=r"registries.conf"):
            control.pull_image("some.example/team/many:2")
        control.close()


def test_a_hundred_and_twenty_layers_in_zstd(control: Control, origin: Registry, tmp_path: Path) -> None:
    layers = [{"bin/busybox": BUSYBOX.read_bytes(), "bin/sh": BUSYBOX.read_bytes()}]
    layers += [{f"l/{n}": b"x", "top": str(n).encode()} for n in range(119)]
    name = origin.push(layout(tmp_path / "o", layers), "deep:1", "--dest-compress-format", "zstd", "--dest-compress")
    info = control.pull_image(name)
    assert len(info.layers) == 120
    with Sandbox(image=name) as box:
        assert box.run("/bin/busybox ls /l | /bin/busybox wc -l; /bin/busybox cat /top").stdout == b"119\n118"


def test_what_can_be_had_again_goes_first_and_what_is_used_stays(
    control: Control, origin: Registry, server: Server
) -> None:
    pulled = control.pull_image(f"{origin.host}/many:1")
    other = control.pull_image(f"{origin.host}/both:1")
    control.import_image(str(image("busybox", "oci")), "mine")
    with Sandbox(image=f"{origin.host}/many:1"):
        would = control.collect_images(Collection(all=True, dry_run=True)).removed
        assert [one.id for one in would] == [other.id]
        assert control.collect_images(Collection(all=True, unused_for_s=3600.0)).removed == []
        assert control.collect_images(Collection()).removed == [], "the disk is not full"
        run = [sys.executable, "-m", "sandmill.cli", "image", "gc", "--all"]
        done = subprocess.run(run, env=server.environment, capture_output=True, text=True, check=True)
        assert f"{origin.host}/both:1" in done.stdout
        assert {name for one in control.images() for name in one.names} == {"host", "mine", f"{origin.host}/many:1"}
    assert [one.id for one in control.collect_images(Collection(target_percent=0.0)).removed] == [pulled.id]
    assert len(control.collect_images(Collection(all=True, imported=True)).removed) == 1
    with pytest.raises(UsageError):
        control.collect_images(Collection(target_percent=101.0))

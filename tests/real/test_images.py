"""Images from Debian's own tools, in every format, run in sandboxes: from a whole distribution to one binary alone."""

import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from sandmill import Sandbox
from sandmill.errors import SandmillError
from sandmill.sdk.configuration import Server as Address
from sandmill.sdk.control import Control

from .conftest import Server
from .images import FORMATS, image


@pytest.fixture
def control(client_environment: Server) -> Iterator[Control]:
    made = Control(Address(client_environment.api_url, client_environment.api_key))
    yield made
    made.close()


@pytest.fixture
def imported(control: Control) -> Iterator[dict[str, str]]:
    """Names of images to be removed after the test."""
    names: dict[str, str] = {}
    yield names
    for name in names:
        control.remove_image(name)


def add(control: Control, imported: dict[str, str], path: Path, name: str) -> str:
    imported[name] = control.import_image(str(path), name).id
    return name


@pytest.mark.parametrize("form", FORMATS)
def test_debian_runs_python_and_git(control: Control, imported: dict[str, str], form: str) -> None:
    name = add(control, imported, image("debian", form), f"debian-{form}")
    with Sandbox(image=name) as box:
        program = "import sqlite3, sys; print(sys.version_info >= (3, 11))"
        assert box.run(["python3", "-c", program]).stdout == b"True\n"
        commit = "git -c user.name=a -c user.email=b commit -q --allow-empty -m x"
        assert box.run(f"git init -q /tmp/r && cd /tmp/r && {commit} && git log --format=%s").stdout == b"x\n"
        assert box.run("stat -c '%U %a' /usr/bin/passwd /tmp /home/user").stdout == b"root 4755\nroot 1777\nuser 755\n"
        if form in ("oci", "docker-archive"):
            assert box.run('pwd; echo "$GREETING"').stdout == b"/work\nhello world\n"


@pytest.mark.parametrize("form", FORMATS)
def test_busybox_needs_no_libc(control: Control, imported: dict[str, str], form: str) -> None:
    name = add(control, imported, image("busybox", form), f"busybox-{form}")
    with Sandbox(image=name) as box:
        expected = b"1000\n" if form in ("oci", "docker-archive") else b"0\n"
        assert box.run("id -u").stdout == expected
        assert box.run("echo a | tr a b", user="user").stdout == b"b\n"


@pytest.mark.parametrize("form", FORMATS)
def test_one_static_binary_alone(control: Control, imported: dict[str, str], form: str) -> None:
    name = add(control, imported, image("static", form), f"static-{form}")
    with Sandbox(image=name) as box:
        result = box.run(["/hello", "a b", "c"])
        uid = 12345 if form in ("oci", "docker-archive") else 0
        assert (result.stdout, result.exit_code) == (f"hello from /hello, uid {uid}\na b\nc\n".encode(), 2)
        with pytest.raises(SandmillError, match=r"(?i)shell"):
            box.run("echo there is no shell")


def test_formats_share_layers(control: Control, imported: dict[str, str]) -> None:
    names = [
        add(control, imported, image("busybox", form), f"shared-{form}") for form in ("oci", "docker-archive", "tar")
    ]
    assert len({control.image(name).layers[0] for name in names}) == 1


def test_device_nodes_are_left_out_and_said(control: Control, imported: dict[str, str]) -> None:
    name = add(control, imported, image("debian", "tar"), "nodes")
    assert any("device node" in warning for warning in control.image(name).warnings)
    with Sandbox(image=name) as box:
        assert box.run("head -c1 /dev/zero | wc -c").stdout.strip() == b"1"


def test_an_image_in_use_is_not_removed(control: Control, imported: dict[str, str]) -> None:
    name = add(control, imported, image("busybox"), "used")
    # By its id: one of several names of an image can be taken away, since the image stays.
    with Sandbox(image=name), pytest.raises(SandmillError, match="in use"):
        control.remove_image(imported[name])


def test_file_capabilities_work(control: Control, imported: dict[str, str], tmp_path: Path) -> None:
    """Root of the image's own user namespace sees the capability that the image was built with."""
    root = tmp_path / "root"
    subprocess.run(["cp", "-a", str(image("debian", "dir")), str(root)], check=True)
    tool = root / "usr/local/bin/tool"
    tool.write_bytes((root / "usr/bin/true").read_bytes())
    tool.chmod(0o755)
    subprocess.run(["chroot", str(root), "setcap", "cap_net_raw+ep", "/usr/local/bin/tool"], check=True)
    name = add(control, imported, root, "capabilities")
    with Sandbox(image=name) as box:
        assert b"cap_net_raw=ep" in box.run("getcap /usr/local/bin/tool").stdout


def test_nothing_of_a_hostile_archive_reaches_the_host(control: Control, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("old")
    archive = tmp_path / "hostile.tar"
    with tarfile.open(archive, "w") as out:
        link = tarfile.TarInfo("bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        out.addfile(link)
        file = tarfile.TarInfo("bin/victim")
        file.size = 3
        out.addfile(file, BytesIO(b"new"))
        out.addfile(tarfile.TarInfo(f"../../../../../../..{tmp_path}/escaped"))
    with pytest.raises(SandmillError, match="out of the root"):
        control.import_image(str(archive), "hostile")
    assert victim.read_text() == "old"
    assert not (tmp_path / "escaped").exists()
    with pytest.raises(SandmillError, match="no image"):
        control.image("hostile")


def test_the_host_image_cannot_be_removed_or_replaced(control: Control) -> None:
    with pytest.raises(SandmillError, match="cannot be removed"):
        control.remove_image("host")
    with pytest.raises(SandmillError, match="own image"):
        control.import_image(str(image("busybox")), "host")

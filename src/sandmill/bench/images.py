"""`sandmill bench images`: a layer's way into the store beside tar and zstd, and one pull for many beside one for one.

Needs zstd, tar, and for pulls docker-registry and skopeo (Debian's packages of these names); what is missing is said.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandmill.bench.latency import Report, environment_of, running_server
from sandmill.bench.samples import Figure, Samples
from sandmill.sdk.configuration import Server
from sandmill.sdk.control import Control
from sandmill.wire import Collection

MIB = 1024 * 1024
READY_S = 10.0


@dataclass(frozen=True)
class ImagePlan:
    """How much to measure. The content is files of this machine's /usr, as an image would have them."""

    layer_mb: int = 1024
    pulled_mb: int = 1024
    layers: int = 10
    askers: int = 200
    rounds: int = 3


def measure_images(plan: ImagePlan, say: Callable[[str], None]) -> Report:
    """Runs everything; `say` hears what is being measured."""
    rows = [
        Samples(f"zstd -d | tar, {plan.layer_mb} MiB, and sync"),
        Samples("import of the same layer"),
        Samples("one pull"),
        Samples(f"{plan.askers} pulls of the same at once"),
    ]
    peer, ours, one, many = rows
    with tempfile.TemporaryDirectory(prefix="sandmill-bench-") as folder, running_server() as variables:
        place = Path(folder)
        server = Server(variables["SANDMILL_API_URL"], variables["SANDMILL_API_KEY"])
        with environment_of(variables):
            control = Control(server)
            if missing := _missing("zstd", "tar"):
                peer.absent = ours.absent = missing
            else:
                say(f"a layer of {plan.layer_mb} MiB")
                layer = layout(place / "layer", plan.layer_mb, 1)
                blob = max((layer / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
                for number in range(plan.rounds):
                    say(f"unpacking, round {number + 1} of {plan.rounds}")
                    to = place / "peer"
                    to.mkdir()
                    line = f"zstd -dcq '{blob}' | tar -xf - -C '{to}' && sync -f '{to}'"
                    peer.time(lambda line=line: subprocess.run(line, shell=True, check=True), 1)  # type: ignore[misc]
                    shutil.rmtree(to)
                    ours.time(lambda: control.import_image(str(layer), "bench"), 1)
                    control.remove_image("bench")
                shutil.rmtree(layer)
            if missing := _missing("docker-registry", "skopeo", "zstd", "tar"):
                one.absent = many.absent = missing
            else:
                say(f"an image of {plan.layers} layers, {plan.pulled_mb} MiB")
                with registry(place / "registry", layout(place / "many", plan.pulled_mb, plan.layers)) as name:
                    for number in range(plan.rounds):
                        say(f"pulling, round {number + 1} of {plan.rounds}")
                        one.time(lambda: control.pull_image(name), 1)
                        control.collect_images(Collection(all=True))
                        many.time(lambda: _at_once(server, name, plan.askers), 1)
                        control.collect_images(Collection(all=True))
            control.close()
    figures = [
        Figure("unpack of a layer into the store, p50", ours.p50, "ms", 1.0, True, peer=peer.name, peer_value=peer.p50),
        Figure(f"{plan.askers} pulls at once, p50", many.p50, "ms", 1.1, True, peer=one.name, peer_value=one.p50),
    ]
    return Report(rows, figures)


def _at_once(server: Server, name: str, askers: int) -> None:
    control = Control(server)
    with ThreadPoolExecutor(askers) as pool:
        images = set(pool.map(lambda _: control.pull_image(name).id, range(askers)))
    control.close()
    if len(images) != 1:
        raise RuntimeError(f"{len(images)} images of one name")


def _missing(*programs: str) -> str | None:
    missing = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def layout(place: Path, size_mb: int, layers: int) -> Path:
    """An OCI layout with `size_mb` MiB of /usr in as many layers, compressed by zstd."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    files = _files(size_mb * MIB)
    described, diff_ids = [], []
    for number in range(layers):
        names = place / "names"
        names.write_bytes(b"\0".join(os.fsencode(path) for path in files[number::layers]))
        tar = place / "layer.tar"
        subprocess.run(["tar", "-C", "/", "--null", "-T", names, "-cf", tar], check=True, stderr=subprocess.DEVNULL)
        diff_ids.append(_digest(tar))
        subprocess.run(["zstd", "-q", "--rm", "-f", tar, "-o", place / "layer.zst"], check=True)
        described.append(_keep(blobs, place / "layer.zst", "layer.v1.tar+zstd"))
        names.unlink()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _document(blobs, config, "config.v1+json"),
        "layers": described,
    }
    index = {"schemaVersion": 2, "manifests": [_document(blobs, manifest, "manifest.v1+json")]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return place


def _files(size_bytes: int) -> list[str]:
    """Files of /usr, relative to /, until their sizes make up `size_bytes`."""
    found: list[str] = []
    total = 0
    for folder, folders, names in os.walk("/usr"):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                stat = os.lstat(path)
            except OSError:
                continue
            if stat.st_nlink == 1:  # a hard link's other name may not be among them
                found.append(path[1:])
                total += stat.st_size
            if total >= size_bytes:
                return found
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _keep(blobs: Path, path: Path, kind: str) -> dict[str, Any]:
    digest, size = _digest(path), path.stat().st_size
    path.rename(blobs / digest.removeprefix("sha256:"))
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": size}


def _document(blobs: Path, content: dict[str, Any], kind: str) -> dict[str, Any]:
    path = blobs / "document"
    path.write_text(json.dumps(content))
    return _keep(blobs, path, kind)


@contextmanager
def registry(place: Path, image: Path) -> Iterator[str]:
    """A registry on loopback with the image of a layout; its name there."""
    place.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": host},
    }
    (place / "config.yml").write_text(json.dumps(config))
    command = ["docker-registry", "serve", str(place / "config.yml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(host.split(":")[1])), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        name = f"{host}/bench:1"
        subprocess.run(
            ["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{image}", f"docker://{name}"], check=True
        )
        yield name
    finally:
        process.kill()
        process.wait()

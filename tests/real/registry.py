"""Real registries (Debian's docker-registry, filled by skopeo) and what can go wrong between them and us."""

import base64
import hashlib
import http.client
import io
import json
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

READY_S = 10.0


@dataclass
class Registry:
    """A running docker-registry on loopback."""

    host: str
    login: tuple[str, str] | None = None

    def push(self, layout: Path, name: str, *options: str) -> str:
        """Copies an OCI layout there; gives the name to pull it by."""
        to = f"{self.host}/{name}"
        creds = ["--dest-creds", ":".join(self.login)] if self.login else []
        command = [
            "skopeo",
            "copy",
            "-q",
            "--dest-tls-verify=false",
            *creds,
            *options,
            f"oci:{layout}",
            f"docker://{to}",
        ]
        subprocess.run(command, check=True, timeout=120)
        return to


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def registry(
    place: Path, *, login: tuple[str, str] | None = None, auth: dict[str, Any] | None = None
) -> Iterator[Registry]:
    """A registry with its data in `place`. `login`: user and password that it wants; `auth`: another way of its own."""
    place.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": host},
    }
    if login is not None:
        made = subprocess.run(["htpasswd", "-Bbn", *login], check=True, capture_output=True, text=True)
        (place / "htpasswd").write_text(made.stdout)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(place / "htpasswd")}}
    if auth is not None:
        config["auth"] = auth
    (place / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        ["docker-registry", "serve", str(place / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_until_it_answers(host)
        yield Registry(host, login)
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(host: str) -> None:
    deadline = time.monotonic() + READY_S
    name, port = host.split(":")
    while True:
        try:
            socket.create_connection((name, int(port)), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@dataclass
class Seen:
    """A request that came through."""

    at: float
    path: str
    range: str | None


Fault = Callable[["_Handler"], bool]
"""Answers a request itself and gives True, or gives False to let it through."""


@dataclass
class Proxy:
    """Stands before a registry: notes what comes, and spoils what it is told to."""

    host: str
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """Each is asked until one takes the request."""
    body: Callable[[str, bytes], bytes] = lambda path, body: body
    """What becomes of a blob's or manifest's bytes."""
    cut_after_bytes: int | None = None
    """Cuts the next blob there, once."""
    ranges: bool = True
    """Whether it knows Range."""

    def count(self, part: str) -> int:
        return sum(part in one.path for one in self.seen)


@contextmanager
def proxy(upstream: Registry) -> Iterator[Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    made = Proxy(f"127.0.0.1:{server.server_port}")
    server.ours = (made, upstream)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        settings: Proxy
        settings, upstream = self.server.ours  # type: ignore[attr-defined]
        settings.seen.append(Seen(time.monotonic(), self.path, self.headers.get("Range")))
        if any(fault(self) for fault in list(settings.faults)):
            return
        connection = http.client.HTTPConnection(upstream.host, timeout=30)
        passed = {
            name: value for name, value in self.headers.items() if name.lower() in ("accept", "authorization", "range")
        }
        if not settings.ranges:
            passed.pop("Range", None)
        with closing(connection):
            connection.request("GET", self.path, headers={**passed, "Host": upstream.host})
            answer = connection.getresponse()
            body = settings.body(self.path, answer.read())
        cut, blob = settings.cut_after_bytes, "/blobs/" in self.path
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if blob and cut is not None and len(body) > cut:
            settings.cut_after_bytes = None
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body)

    def refuse(self, status: int, **headers: str) -> bool:
        body = b'{"errors":[{"code":"TEST","message":"as the test wants it"}]}'
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True


def first(count: int, status: int, *, part: str = "/v2/", **headers: str) -> Fault:
    """Refuses the first `count` requests whose path has `part` in it."""
    left = [count]

    def fault(handler: _Handler) -> bool:
        if left[0] == 0 or part not in handler.path:
            return False
        left[0] -= 1
        return handler.refuse(status, **headers)

    return fault


def layout(
    place: Path, layers: list[dict[str, bytes]], *, platforms: tuple[str, ...] = ("amd64",), user: str = ""
) -> Path:
    """An OCI layout of an image with these files (path to content) in each layer; with several platforms, an index of them."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    manifests = []
    for platform in platforms:
        tars = [_tar({**files, "etc/arch": platform.encode()} if not n else files) for n, files in enumerate(layers)]
        config = {
            "architecture": platform,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "User": user},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(tar).hexdigest() for tar in tars]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [blob(tar, "layer.v1.tar") for tar in tars],
        }
        described = blob(json.dumps(manifest).encode(), "manifest.v1+json")
        manifests.append({**described, "platform": {"os": "linux", "architecture": platform}})
    index: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    }
    if len(platforms) > 1:
        index = {"schemaVersion": 2, "manifests": [blob(json.dumps(index).encode(), "index.v1+json")]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return place


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


@contextmanager
def token_server(place: Path, login: tuple[str, str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """A server of bearer tokens as Docker's: the registry's `auth` for it, and the scopes that were asked for."""
    import trustme
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    place.mkdir(parents=True, exist_ok=True)
    issued = trustme.CA().issue_cert("tokens.test", key_type=trustme.KeyType.ECDSA)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    chain = issued.cert_chain_pems[0].bytes()
    (place / "bundle.pem").write_bytes(chain)
    lines = [line for line in chain.decode().splitlines() if line and "-----" not in line]
    scopes: list[str] = []

    def part(data: object) -> str:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    class Tokens(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            from urllib.parse import parse_qs, urlsplit

            from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

            wanted = "Basic " + base64.b64encode(":".join(login).encode()).decode()
            query = parse_qs(urlsplit(self.path).query)
            scope = query.get("scope", [""])[0]
            scopes.append(scope)
            allowed = self.headers.get("Authorization") == wanted
            kind, _, rest = scope.partition(":")
            name, _, actions = rest.rpartition(":")
            access = [{"type": kind, "name": name, "actions": actions.split(",")}] if allowed and name else []
            now = int(time.time())
            claims = {
                "iss": "test",
                "sub": "",
                "aud": "registry",
                "nbf": now - 10,
                "iat": now,
                "exp": now + 300,
                "jti": "1",
            }
            signed = (
                f"{part({'typ': 'JWT', 'alg': 'ES256', 'x5c': [''.join(lines)]})}.{part({**claims, 'access': access})}"
            )
            r, s = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
            token = f"{signed}.{part(r.to_bytes(32) + s.to_bytes(32))}"
            body = json.dumps({"token": token, "expires_in": 300}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    auth = {
        "token": {
            "realm": f"http://127.0.0.1:{server.server_port}/token",
            "service": "registry",
            "issuer": "test",
            "rootcertbundle": str(place / "bundle.pem"),
        }
    }
    try:
        yield auth, scopes
    finally:
        server.shutdown()
        server.server_close()

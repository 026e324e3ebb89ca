"""The images that real tests run on, built here with Debian's own tools (mmdebstrap, umoci, skopeo, cc).

Three of them, from full to empty: `debian` (Python and git), `busybox` (one program under many names), and `static`
(one static binary alone: no shell, no libc, no /etc). Each is kept in every format that can be imported, under
`~/.cache/sandmill/test-images/<recipe>`, where a changed recipe is another directory. `python tests/real/images.py`
builds them ahead of time and prints where they lie.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sandmill" / "test-images"
FORMATS = ("oci", "docker-archive", "tar", "dir")
BUILD_TIMEOUT_S = 600
PATH_ENV = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

STATIC_PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "sleep") == 0) { sleep(3600); return 0; }
    printf("hello from %s, uid %d\n", argv[0], (int)getuid());
    for (int i = 1; i < argc; i++) printf("%s\n", argv[i]);
    return argc - 1;
}
"""


@dataclass(frozen=True)
class Recipe:
    """How one image is made: a shell script that fills `$ROOT`, and the configuration it gets."""

    name: str
    script: str
    config: tuple[str, ...]
    """Arguments of `umoci config`."""

    @property
    def home(self) -> Path:
        text = repr((self.script, self.config, STATIC_PROGRAM))
        return CACHE / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


RECIPES = {
    "debian": Recipe(
        "debian",
        # `apt` variant: essential packages and apt, as the official images have.
        "mmdebstrap --quiet --mode=root --variant=apt"
        " --include=python3-minimal,libpython3-stdlib,git,ca-certificates,libcap2-bin"
        " --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*'"
        " --dpkgopt='path-exclude=/usr/share/doc/*' --customize-hook='chroot \"$1\" useradd -m -s /bin/bash user'"
        ' --format=directory bookworm "$ROOT"',
        (
            "--config.env",
            PATH_ENV,
            "--config.env",
            "GREETING=hello world",
            "--config.workingdir",
            "/work",
            "--config.cmd",
            "bash",
        ),
    ),
    "busybox": Recipe(
        "busybox",
        'mkdir -p "$ROOT"/bin "$ROOT"/etc "$ROOT"/tmp "$ROOT"/root && chmod 1777 "$ROOT"/tmp && '
        'cp "$(command -v busybox)" "$ROOT"/bin/busybox && '
        'for name in $("$ROOT"/bin/busybox --list); do '
        '[ "$name" = busybox ] || ln -s busybox "$ROOT/bin/$name"; done && '
        "printf 'root:x:0:0:root:/root:/bin/sh\\nuser:x:1000:1000:user:/home/user:/bin/sh\\n' "
        '> "$ROOT"/etc/passwd && '
        'install -d -o 1000 -g 1000 "$ROOT"/home/user',
        ("--config.env", "PATH=/bin", "--config.user", "user"),
    ),
    "static": Recipe(
        "static",
        'mkdir -p "$ROOT" && cc -static -O2 -o "$ROOT"/hello "$SOURCE" && strip "$ROOT"/hello',
        ("--config.entrypoint", "/hello", "--config.user", "12345"),
    ),
}


def image(name: str, form: str = "oci") -> Path:
    """The image `name` in the format `form`, built on first use (the Debian one takes about half a minute).

    Raises FileNotFoundError with the package to install where a tool is missing.
    """
    home = RECIPES[name].home
    if not home.exists():
        _build(RECIPES[name])
    return home / {"oci": "oci", "docker-archive": "docker.tar", "tar": "root.tar", "dir": "root"}[form]


def _build(recipe: Recipe) -> None:
    for tool, package in {
        "mmdebstrap": "mmdebstrap",
        "umoci": "umoci",
        "skopeo": "skopeo",
        "busybox": "busybox-static",
        "cc": "gcc",
    }.items():
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"{tool} is missing: sudo apt-get install {package}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if recipe.home.exists():
            return
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".building-") as folder:
            place = Path(folder) / "image"
            place.mkdir()
            _fill(recipe, place)
            place.rename(recipe.home)


def _fill(recipe: Recipe, place: Path) -> None:
    root, source = place / "root", place / "hello.c"
    source.write_text(STATIC_PROGRAM)
    _run("sh", "-euc", recipe.script, env={"ROOT": str(root), "SOURCE": str(source)})
    source.unlink()
    # Device nodes stay in the tar, where an import has to leave them out.
    _run(
        "tar",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=security.capability",
        "-C",
        str(root),
        "-cf",
        str(place / "root.tar"),
        ".",
    )
    _run("umoci", "init", "--layout", str(place / "oci"))
    reference = f"{place / 'oci'}:{recipe.name}"
    _run("umoci", "new", "--image", reference)
    _run("umoci", "raw", "add-layer", "--image", reference, str(place / "root.tar"))
    _run("umoci", "config", "--image", reference, *recipe.config)
    # What the steps before left behind; the layout then holds one image.
    _run("umoci", "gc", "--layout", str(place / "oci"))
    _run("skopeo", "copy", "--quiet", f"oci:{reference}", f"docker-archive:{place / 'docker.tar'}:{recipe.name}:latest")


def _run(*argv: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, check=False, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RECIPES:
        for form in FORMATS:
            sys.stdout.write(f"{image(wanted, form)}\n")

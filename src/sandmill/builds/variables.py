"""ARG and ENV: what a variable means at a line of a Dockerfile."""

import platform
from collections.abc import Mapping
from typing import Final

from e2b_dockerfile_utils import ShellLex

ARCHITECTURES: Final = {"x86_64": ("amd64", ""), "aarch64": ("arm64", ""), "armv7l": ("arm", "v7"), "i686": ("386", "")}
PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
UNDECLARED: Final = frozenset(PROXIES) | {name.lower() for name in PROXIES}
"""Build arguments that RUN sees without an ARG; they don't count for the cache in Docker, and are part of the key here."""


def this_platform() -> tuple[str, str, str]:
    """Operating system, architecture and variant of this machine, as Docker names them."""
    architecture, variant = ARCHITECTURES.get(platform.machine(), (platform.machine(), ""))
    return "linux", architecture, variant


def is_this_platform(name: str) -> bool:
    """Whether `linux/amd64`, `amd64`, `linux/x86_64`, … is this machine's."""
    system, architecture, variant = this_platform()
    parts = name.lower().split("/")
    if len(parts) == 1:
        parts = parts if parts[0] == "linux" else ["linux", *parts]
    known = {architecture, platform.machine()}
    machine = parts[1] if len(parts) > 1 else architecture
    return parts[0] == system and machine in known and (len(parts) < 3 or parts[2] in ("v8", variant))


def platform_args(stage: str) -> dict[str, str]:
    """Arguments that are there by themselves: in FROM lines, and in a stage that declares them."""
    system, architecture, variant = this_platform()
    whole = "/".join(filter(None, (system, architecture, variant)))
    args = {"TARGETSTAGE": stage}
    for side in ("TARGET", "BUILD"):
        args |= {f"{side}PLATFORM": whole, f"{side}OS": system, f"{side}ARCH": architecture, f"{side}VARIANT": variant}
    return args


class Scope:
    """The variables of one stage: ENV wins over ARG. `given` are the build's own arguments, `outer` what a declared ARG without
    a value falls back to."""

    def __init__(self, escape: str, given: Mapping[str, str], outer: Mapping[str, str]) -> None:
        self.env: dict[str, str] = {}
        self.args: dict[str, str] = {}
        self._escape = escape
        self._given = given
        self._outer = outer

    def child(self) -> "Scope":
        """Of a stage that begins where this one ended."""
        made = Scope(self._escape, self._given, self._outer)
        made.env, made.args = dict(self.env), dict(self.args)
        return made

    def expand(self, word: str) -> str:
        """A word without its quotes, its variables replaced; one that is not set is empty. Raises ValueError."""
        return self._lex().process_word(word)

    def words(self, text: str) -> list[str]:
        """As `expand`; blanks in variables part words. Raises ValueError."""
        return self._lex().process_words(text)

    def document(self, text: str) -> str:
        """A heredoc: variables are replaced, quotes stay. Raises ValueError."""
        return ShellLex(self._escape, skip_process_quotes=True, env=self._values(), skip_unset_env=False).process_word(
            text
        )

    def declare(self, declaration: str) -> None:
        """ARG: the build's argument, else the default here, else the outer one; else it stays unset."""
        name, assigned, default = declaration.partition("=")
        if name in self._given:
            self.args[name] = self._given[name]
        elif assigned:
            self.args[name] = self.expand(default)
        elif name in self._outer:
            self.args[name] = self._outer[name]

    def of_commands(self) -> dict[str, str]:
        """The environment of RUN."""
        undeclared = {name: value for name, value in self._given.items() if name in UNDECLARED}
        return undeclared | self.args | self.env

    def _values(self) -> dict[str, str]:
        return self.args | self.env

    def _lex(self) -> ShellLex:
        return ShellLex(self._escape, env=self._values(), skip_unset_env=False)

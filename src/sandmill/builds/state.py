"""A stage on its way: its image so far, its variables, and the configuration that it will have."""

from dataclasses import dataclass, field
from typing import Final

from sandmill.builds.dockerfile import Instruction
from sandmill.builds.variables import Scope
from sandmill.errors import UsageError
from sandmill.wire import ImageConfig

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that has none."""
SHELL: Final = ("/bin/sh", "-c")


@dataclass
class State:
    """What the instructions of a stage change, but for files."""

    image: str
    scope: Scope
    user: str | None = None
    workdir: str = "/"
    shell: tuple[str, ...] = SHELL
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    has_cmd: bool = False
    """Whether CMD is this stage's own: an ENTRYPOINT takes an inherited one away."""
    volumes: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    def child(self) -> "State":
        """Where a stage begins that is built from this one."""
        made = State(self.image, self.scope.child(), self.user, self.workdir, self.shell)
        made.entrypoint, made.cmd = list(self.entrypoint), list(self.cmd)
        made.volumes, made.labels = list(self.volumes), dict(self.labels)
        return made

    @staticmethod
    def of(image: str, config: ImageConfig, scope: Scope) -> "State":
        """Where a stage begins that is built from an image."""
        scope.env = {"PATH": PATH} | config.env
        made = State(image, scope, config.user, config.workdir or "/")
        made.entrypoint, made.cmd = list(config.entrypoint), list(config.cmd)
        made.volumes, made.labels = list(config.volumes), dict(config.labels)
        return made


def argument(one: Instruction, scope: Scope) -> str:
    """The argument of an instruction that has one. Raises UsageError if nothing is left of it."""
    value = scope.expand(one.args[0])
    if not value:
        raise UsageError(f"{one.text}: it is empty")
    return value


def pairs(one: Instruction, scope: Scope) -> dict[str, str]:
    """Of ENV and LABEL: the words come in threes, name, value and what stood between them."""
    return {scope.expand(one.args[at]): scope.expand(one.args[at + 1]) for at in range(0, len(one.args), 3)}


def command(one: Instruction, state: State) -> list[str]:
    return list(one.args) if one.json or not one.args else [*state.shell, one.args[0]]

"""Options that several commands share, and what they mean."""

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

SHELL_CHARACTERS = frozenset(" \t\n;|&<>()$`\\\"'*?[]#~=%{}!")

AS_WRITTEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Options after the first word of a command line belong to that command."""


Spec = Callable[[], dict[str, Any]]
SPEC = ("image", "pull", "network", "cpu", "memory_mb", "disk_mb", "pids", "name")


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a sandbox is made of. The command gets it as `spec`, which gives the arguments of `Sandbox`, or raises
    click.BadParameter."""

    @wraps(command)
    def with_spec(*, metadata_: Sequence[str], **options: Any) -> Any:
        plain = {name: options.pop(name) for name in SPEC}
        return command(spec=lambda: plain | {"metadata": metadata(metadata_)}, **options)

    made: Callable[..., Any] = with_spec
    for option in (
        click.option("--name", help="A name to find it by."),
        click.option(
            "--metadata", "-m", "metadata_", multiple=True, metavar="KEY=VALUE", help="Metadata; may be repeated."
        ),
        click.option("--pids", type=click.IntRange(min=8), help="Limit: processes."),
        click.option("--disk-mb", type=click.IntRange(min=1), help="Limit: disk space written, in MiB."),
        click.option("--memory-mb", type=click.IntRange(min=8), help="Limit: memory, in MiB."),
        click.option("--cpu", type=click.FloatRange(min=0.01), help="Limit: cores."),
        click.option(
            "--network",
            type=click.Choice(["none", "all"]),
            default="none",
            show_default=True,
            help="none, or all but this machine and its neighbours.",
        ),
        click.option(
            "--pull",
            type=click.Choice(["missing", "always", "never"]),
            default="missing",
            show_default=True,
            help="When to ask the image's registry.",
        ),
        click.option(
            "--image",
            "-i",
            default="host",
            show_default=True,
            help="host, an image of `sandmill image ls`, or a name in a registry.",
        ),
    ):
        made = option(made)
    return made


def place_options(command: F) -> F:
    """Where and as whom a command runs."""
    for option in (
        click.option("--user", "-u", help="A name, a uid or uid:gid."),
        click.option("--workdir", "-w", help="Working directory."),
        click.option("--env", "-e", multiple=True, metavar="NAME[=VALUE]", help="Environment; without a value: ours."),
    ):
        command = option(command)
    return command


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """Raises click.BadParameter for a name that isn't set here."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or (not equals and name not in os.environ):
            raise click.BadParameter(f"--env {pair}: it is NAME=VALUE, or the NAME of a variable that is set here")
        found[name] = value if equals else os.environ[name]
    return found


def metadata(pairs: Sequence[str]) -> dict[str, str]:
    """Raises click.BadParameter."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"--metadata {pair}: it is KEY=VALUE")
        found[name] = value
    return found


def seconds(text: str, option: str) -> float:
    """`90`, `90s`, `30m`, `12h`, `7d`. Raises click.BadParameter."""
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "s")
    try:
        value = float(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    except (ValueError, KeyError):
        raise click.BadParameter(f"{option} {text}: it is a number with s, m, h or d behind") from None
    if not 0 <= value < float("inf"):
        raise click.BadParameter(f"{option} {text}: it is 0 or more")
    return value


def command_of(words: Sequence[str]) -> str | list[str]:
    """A program with its arguments; a single word that only a shell understands is a shell line."""
    if len(words) == 1 and (not words[0] or SHELL_CHARACTERS & set(words[0])):
        return words[0]
    return list(words)

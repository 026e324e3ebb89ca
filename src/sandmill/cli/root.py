"""The command group, and how mistakes are told."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, Final

import click

from sandmill.errors import NodeError, SandboxGoneError, SandmillError, TransportError, UsageError

COMMANDS: Final = {
    "run": ("sandmill.cli.run", "run_command", "Run a command in a new sandbox, which ends with it."),
    "create": ("sandmill.cli.run", "create_command", "Make a sandbox that stays, and print its id."),
    "exec": ("sandmill.cli.run", "exec_command", "Run a command in a sandbox."),
    "shell": ("sandmill.cli.shell", "shell_command", "Open a terminal in a sandbox, or in a new one."),
    "ls": ("sandmill.cli.manage", "ls_command", "List sandboxes."),
    "inspect": ("sandmill.cli.manage", "inspect_command", "Show everything about a sandbox."),
    "cp": ("sandmill.cli.copy", "cp_command", "Copy files and folders into and out of a sandbox."),
    "kill": ("sandmill.cli.manage", "kill_command", "End sandboxes."),
    "image": ("sandmill.cli.image", "image_group", "Build, list, import, inspect and remove images."),
    "serve": ("sandmill.cli.serve", "serve_command", "Start the server."),
    "doctor": ("sandmill.cli.doctor", "doctor_command", "Say what this machine gives and lacks."),
    "eval": ("sandmill.rollouts.cli", "eval_command", "Let agents attempt tasks, and grade them."),
    "bench": ("sandmill.bench.cli", "bench_command", "Measure this machine beside its peers."),
}
"""Module, attribute and one line of help of each command, in the order of the help."""

IN_PROCESS: Final = frozenset({"eval"})
"""Commands that make clients of their own: they find the server that runs here through the environment."""

FAILED: Final = 1
MISTAKE: Final = 2
NO_RESULT: Final = 125
"""There is no exit code of the command: the sandbox is gone, or the server can't be reached."""
INTERRUPTED: Final = 130


class Interrupted(BaseException):
    """A signal asks us to end; what was started is ended on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Root(click.Group):
    """Loads a command's module when the command is used; the help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, _, about) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(name, COMMANDS, 1)
            raise click.UsageError(
                f"there is no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), ctx
            )
        if name in IN_PROCESS:
            from sandmill.cli.client import point_here

            point_here()
        return super().resolve_command(ctx, args)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(message="sandmill %(version)s", package_name="sandmill")
def root() -> None:
    """Isolated sandboxes for agents' tool calls, on one Linux machine.

    \b
    Examples:
      sandmill run true
      sandmill run --memory-mb 512 -- python3 -c 'print(6 * 7)'
      sandmill serve
      sandmill eval examples/tasks --agent oracle --agent nop -k 4

    Commands use the server of SANDMILL_API_URL and SANDMILL_API_KEY, else the one that `sandmill serve` runs on this machine.
    Without either, `run` and `shell` start one of their own, which ends with them.
    """


def run(words: list[str]) -> int:
    """Runs a command line; the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        code: Any = root.main(words, prog_name="sandmill", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return MISTAKE
    except click.UsageError as error:
        hint = (
            f"sandmill {error.ctx.info_name} --help"
            if error.ctx is not None and error.ctx.parent
            else "sandmill --help"
        )
        return complain(UsageError(error.format_message(), hint=hint))
    except click.ClickException as error:
        return complain(UsageError(error.format_message()))
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Interrupted as error:
        return 128 + error.number
    except BrokenPipeError:
        # Whoever read our output has gone; Python must not complain about it when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else FAILED
    except SandmillError as error:
        return complain(error)
    except Exception as error:
        # The one place that catches everything: a person gets a sentence, whoever debugs gets the trace.
        if os.environ.get("SANDMILL_DEBUG"):
            raise
        return complain(
            SandmillError(
                f"a bug of sandmill: {type(error).__name__}: {error}",
                hint="SANDMILL_DEBUG=1 shows the trace; please report it",
            )
        )
    return code if isinstance(code, int) else 0


def complain(error: SandmillError) -> int:
    """Tells a mistake or a failure; the exit code for it."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    if error.code == "preparation_failed" and error.details.get("log"):
        print(str(error.details["log"]).rstrip(), file=sys.stderr)
    if isinstance(error, UsageError):
        return MISTAKE
    return NO_RESULT if isinstance(error, (SandboxGoneError, TransportError, NodeError)) else FAILED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)

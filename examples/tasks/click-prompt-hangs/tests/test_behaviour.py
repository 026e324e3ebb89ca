import signal

import click
import pytest
from click.testing import CliRunner


@pytest.fixture(autouse=True)
def no_hang():
    # Not an Exception: the runner would catch it, and its endless output would be compared.
    class Hangs(BaseException):
        pass

    def ring(*_):
        raise Hangs

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


@click.command()
@click.option("--name", prompt=True)
def hello(name):
    click.echo(f"Hello {name}")


@click.command()
def two():
    click.echo("begin")
    click.echo(click.prompt("first"))
    click.echo(click.prompt("second", hide_input=True))


@pytest.mark.parametrize("given", ["", None])
def test_no_input_aborts(given):
    result = CliRunner().invoke(hello, input=given)
    assert result.exit_code == 1
    assert "Aborted!" in result.output


def test_hidden_prompt_aborts_and_output_is_kept():
    result = CliRunner().invoke(two, input="one\n")
    assert result.exit_code == 1
    assert result.output.startswith("begin\n")
    assert "one\n" in result.output
    assert "Aborted!" in result.output


def test_enough_input():
    result = CliRunner().invoke(two, input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.output.endswith("two\n")


def test_empty_line_takes_the_default():
    @click.command()
    @click.option("--size", prompt=True, default=7)
    def size(size):
        click.echo(f"size {size}")

    result = CliRunner().invoke(size, input="\n")
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "size 7")


def test_last_line_without_newline():
    assert CliRunner().invoke(hello, input="Ada").output.splitlines()[-1] == "Hello Ada"


def test_confirm():
    @click.command()
    def sure():
        click.confirm("sure?", abort=True)
        click.echo("yes")

    assert CliRunner().invoke(sure, input="y\n").output.splitlines()[-1] == "yes"
    assert CliRunner().invoke(sure, input="").exit_code == 1

"""ARG and ENV, as Docker has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.builds.variables import Scope, is_this_platform, platform_args

TEXT = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=("Cs",)), max_size=40)


def scope(**env: str) -> Scope:
    made = Scope("\\", {}, {})
    made.env = env
    return made


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$set", "s"),
        ("${set}x", "sx"),
        ("$unset", ""),
        ("${unset:-d}", "d"),
        ("${empty:-d}", "d"),
        ("${empty-d}", ""),
        ("${set:-d}", "s"),
        ("${unset:+a}", ""),
        ("${empty:+a}", ""),
        ("${empty+a}", "a"),
        ("${set:+a}", "a"),
        ("${unset:-${set}}", "s"),
        ("\\$set", "$set"),
        ("\"$set 'x'\"", "s 'x'"),
        ("'$set'", "$set"),
        ("a\\ b", "a b"),
        ("$", "$"),
        ("${path#*/}", "b/c"),
        ("${path##*/}", "c"),
        ("${path%/*}", "a/b"),
        ("${path/b/x}", "a/x/c"),
    ],
)
def test_substitution(word: str, expected: str) -> None:
    assert scope(set="s", empty="", path="a/b/c").expand(word) == expected


def test_a_variable_that_must_be_set() -> None:
    with pytest.raises(ValueError, match="give it"):
        scope().expand("${x:?give it}")


@given(TEXT)
def test_single_quotes_keep_everything(text: str) -> None:
    text = text.replace("'", "")
    assert scope().expand(f"'{text}'") == text


@given(TEXT)
def test_double_quotes_keep_what_is_escaped(text: str) -> None:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    assert scope().expand(f'"{quoted}"') == text


@given(TEXT, TEXT)
def test_a_value_is_not_looked_at_again(one: str, other: str) -> None:
    made = scope(a=one, b=other)
    assert made.expand("$a-${b}") == f"{one}-{other}"
    assert made.document("x $a 'y' \"$b\"") == f"x {one} 'y' \"{other}\""


def test_env_wins_over_arg_and_the_build_over_a_default() -> None:
    made = Scope("\\", {"given": "g", "undeclared": "u", "http_proxy": "p"}, {"outer": "o"})
    made.declare("given=default")
    made.declare("outer")
    made.declare("nothing")
    made.declare("chained=$given-$outer-$undeclared")
    made.declare("both=arg")
    assert made.expand("$given $outer $nothing $chained $both") == "g o  g-o- arg"
    made.env["both"] = "env"
    made.declare("both=arg")
    assert made.expand("$both") == "env"
    expected = {"given": "g", "outer": "o", "chained": "g-o-", "both": "env", "http_proxy": "p"}
    assert made.of_commands() == expected


def test_a_child_has_what_its_parent_had_and_changes_nothing_there() -> None:
    parent = scope(a="1")
    parent.declare("b=2")
    child = parent.child()
    child.env["a"] = "3"
    child.declare("b=4")
    assert (child.expand("$a$b"), parent.expand("$a$b")) == ("34", "12")


def test_platforms() -> None:
    here = platform_args("x")["TARGETPLATFORM"]
    assert all(is_this_platform(name) for name in (here, here.partition("/")[2], "linux"))
    assert not any(is_this_platform(name) for name in ("windows/amd64", "linux/riscv64", "s390x"))

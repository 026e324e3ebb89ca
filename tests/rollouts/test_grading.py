"""Reward files."""

import pytest

from sandmill.rollouts.failures import GraderError
from sandmill.rollouts.grading import parse_json, parse_text


@pytest.mark.parametrize(("data", "reward"), [(b"1", 1.0), (b" 0.25\n", 0.25), (b"-2", -2.0)])
def test_text(data: bytes, reward: float) -> None:
    assert parse_text(data).reward == reward


@pytest.mark.parametrize(
    ("data", "reward", "names"),
    [
        (b"0.5", 0.5, ["reward"]),
        (b'{"reward": 1, "style": 0.2}', 1.0, ["reward", "style"]),
        (b'{"accuracy": 0.7}', 0.7, ["accuracy"]),
    ],
)
def test_json(data: bytes, reward: float, names: list[str]) -> None:
    grade = parse_json(data)
    assert (grade.reward, list(grade.rewards)) == (reward, names)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'"1"', b"NaN", b"1e999", b'{"a": 1, "b": 2}', b'{"reward": null}', b"{"]
)
def test_broken_json(data: bytes) -> None:
    with pytest.raises(GraderError) as caught:
        parse_json(data)
    assert caught.value.code == "reward_invalid"

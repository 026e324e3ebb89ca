"""Errors: whole over the wire and through pickle, rebuilt from a fixed table."""

import pickle

import pytest

from sandmill import errors
from sandmill.errors import BY_CODE, BY_STATUS, SandmillError, from_wire


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_code_comes_back_as_its_class(code: str) -> None:
    error = BY_CODE[code]("what happened", code=code, hint="do this", retryable=True, details={"a": 1})
    again = from_wire(error.as_wire(), 500)
    assert type(again) is BY_CODE[code]
    assert again.as_wire() == error.as_wire()


@pytest.mark.parametrize("status", sorted(BY_STATUS))
def test_an_unknown_code_takes_the_class_of_its_status(status: int) -> None:
    assert type(from_wire({"code": "never_heard_of", "message": "m"}, status)) is BY_STATUS[status]


def test_odd_shapes_do_no_harm() -> None:
    for shape in ({}, {"code": 404}, {"message": None, "details": 3}, {"code": "x", "error_code": "sandbox_gone"}):
        assert isinstance(from_wire(shape, 418), SandmillError)


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in dir(errors) if name.endswith("Error")])
def test_errors_survive_pickle(kind: type[Exception]) -> None:
    if not issubclass(kind, SandmillError):
        return
    error = kind("m", hint="h", details={"cause": "oom"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code, again.details) == (kind, "m (h)", error.code, error.details)

"""The state directory: one server each, a key that stays, files that are whole."""

from pathlib import Path

import pytest

from sandmill.control.serve import Address
from sandmill.control.state_dir import KEY_FORM, StateDir
from sandmill.errors import ConflictError, UsageError
from sandmill.sdk.configuration import running_beside


def test_the_key_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDMILL_API_KEY", raising=False)
    state = StateDir.claim(tmp_path / "a" / "b")
    key = state.api_key()
    assert KEY_FORM.fullmatch(key)
    assert (state.path / "api-key").stat().st_mode & 0o777 == 0o600
    assert state.api_key() == key
    monkeypatch.setenv("SANDMILL_API_KEY", "e2b_" + "a" * 40)
    assert state.api_key() == "e2b_" + "a" * 40
    monkeypatch.setenv("SANDMILL_API_KEY", "secret")
    with pytest.raises(UsageError, match="SANDMILL_API_KEY"):
        state.api_key()
    state.release()


def test_one_server_a_directory(tmp_path: Path) -> None:
    first = StateDir.claim(tmp_path)
    first.announce("http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(ConflictError, match=r"process \d+, http://127.0.0.1:1"):
        StateDir.claim(tmp_path)
    first.release()
    first.release()
    StateDir.claim(tmp_path).release()


def test_clients_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDMILL_API_KEY", raising=False)
    state = StateDir.claim(tmp_path)
    key = state.api_key()
    assert running_beside(tmp_path) is None
    state.announce("http://127.0.0.1:1", "http://127.0.0.1:2")
    beside = running_beside(tmp_path)
    assert beside is not None
    assert (beside.api_url, beside.api_key) == ("http://127.0.0.1:1", key)
    state.release()
    assert running_beside(tmp_path) is None


def test_a_directory_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be used"):
        StateDir.claim(tmp_path / "file" / "state")


def test_addresses() -> None:
    assert Address.parse("127.0.0.1:0", "--listen").loopback
    assert Address.parse("[::1]:80", "--listen").url(80) == "http://[::1]:80"
    assert Address.parse("localhost:80", "--listen").loopback
    assert not Address.parse("0.0.0.0:80", "--listen").loopback
    for wrong in ("127.0.0.1", ":80", "h:x", "h:70000", "h:-1"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            Address.parse(wrong, "--listen")

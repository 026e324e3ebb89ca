"""Output that is handed over live and kept: bounded, and what is missing is said."""

from hypothesis import given
from hypothesis import strategies as st

from sandmill.sdk.live import Kept, Live
from sandmill.sdk.process import Output
from sandmill.wire import Result


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 64))
def test_the_middle_is_cut_and_said(pieces: list[bytes], limit: int) -> None:
    kept = Kept(limit)
    for piece in pieces:
        kept.add(piece)
    whole = b"".join(pieces)
    if len(whole) <= limit:
        assert (kept.bytes(), kept.cut()) == (whole, None)
        return
    assert len(kept.bytes()) == limit
    cut = kept.cut()
    assert cut is not None
    offset, missing = cut
    assert whole[:offset] + whole[offset + missing :] == kept.bytes()
    assert missing == len(whole) - limit


def test_listeners_hear_all_of_their_stream() -> None:
    heard: list[bytes] = []
    live = Live(2, heard.append, None)
    live.take(Output("stdout", b"abc", 0))
    live.take(Output("stderr", b"e", 0))
    result = live.result(Result(pid=1, exit_code=0))
    assert heard == [b"abc"]
    assert (result.stdout, result.stdout_cut, result.stderr, result.stderr_cut) == (b"ac", (1, 1), b"e", None)

"""The HTTP core: whatever pieces an answer comes in, the same answer comes out."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.sdk import http1

BODIES = st.binary(max_size=300)


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[a:b] for a, b in pairwise(places)]


def read(parts: list[bytes]) -> http1.Reader:
    reader = http1.Reader()
    for part in parts:
        reader.feed(part)
    return reader


@given(BODIES, st.lists(st.integers(0, 1000)))
def test_length(body: bytes, cuts: list[int]) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-A:  b \r\n\r\n" % len(body) + body + b"rest"
    reader = read(pieces(raw, cuts))
    assert reader.done
    assert (bytes(reader.body), reader.rest) == (body, b"rest")
    assert reader.head is not None
    assert reader.head.headers[b"x-a"] == b"b"


@given(st.lists(BODIES.filter(len)), st.lists(st.integers(0, 3000)))
def test_chunked(chunks: list[bytes], cuts: list[int]) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(map(http1.chunk, chunks)) + http1.LAST_CHUNK
    reader = read(pieces(raw, cuts))
    assert reader.done
    assert bytes(reader.body) == b"".join(chunks)


@given(st.integers(0, 60))
def test_a_cut_answer_is_never_whole(end: int) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    reader = read([raw[: min(end, len(raw) - 1)]])
    assert not reader.done
    with pytest.raises(http1.ProtocolError):
        reader.end_of_stream()


def test_an_answer_without_length_ends_with_the_connection() -> None:
    reader = read([b"HTTP/1.1 200 OK\r\n\r\nall", b" of it"])
    assert not reader.done
    reader.end_of_stream()
    assert (reader.done, bytes(reader.body)) == (True, b"all of it")


def test_interim_answers_are_skipped_and_an_upgrade_is_not() -> None:
    reader = read([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"])
    assert reader.head is not None
    assert (reader.head.status, reader.done) == (204, True)
    reader = read([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: sandmill\r\n\r\nearly"])
    assert (reader.done, reader.rest) == (True, b"early")


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"a" * (http1.MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_not_http_is_said(raw: bytes) -> None:
    with pytest.raises(http1.ProtocolError):
        read([raw])

"""The text that decided bytes become: whole characters, ends at stops, and the same whatever the chunks."""

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.models.generation import Decision
from lightning_blocktrain.serving.completion_text import Envelope, Piece, Transcript, joined, usage_of


def pieces_of(chunks: Sequence[bytes], stops: Sequence[bytes] = (), echoed: str = "") -> list[Piece]:
    transcript = Transcript(stops, echoed)
    pieces = []
    for chunk in chunks:
        pieces.append(transcript.add(Decision(tuple(chunk), (0.5,) * len(chunk))))
        if pieces[-1].finish_reason is not None:
            return pieces
    return [*pieces, transcript.end()]


def cut(text: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return a text in chunks; the last one is what is left."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(text[start : start + size])
        start += size
    return [chunk for chunk in [*chunks, text[start:]] if chunk]


NEARLY_TEXT = st.lists(
    st.binary(max_size=4) | st.text(max_size=3).map(lambda text: text.encode(errors="surrogatepass")), max_size=8
).map(b"".join)
SIZES = st.lists(st.integers(1, 5), max_size=20)


@given(NEARLY_TEXT, SIZES)
def test_pieces_are_the_text_that_all_bytes_are(text: bytes, sizes: list[int]) -> None:
    pieces = pieces_of(cut(text, sizes))
    whole = joined(pieces)
    assert (whole.text, whole.finish_reason) == (text.decode(errors="replace"), "length")
    assert len(whole.tokens) == len(whole.logprobs) == len(whole.offsets) == len(text)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_a_character_that_two_chunks_share_comes_whole() -> None:
    euro = "\u20ac".encode()
    assert [piece.text for piece in pieces_of([b"a" + euro[:1], euro[1:2], euro[2:] + b"b"])] == [
        "a",
        "",
        "\u20acb",
        "",
    ]
    assert [piece.text for piece in pieces_of([b"a" + euro[:2]])] == ["a", "\ufffd"]


@given(NEARLY_TEXT, SIZES)
def test_offsets_are_those_of_the_character_of_each_byte(text: bytes, sizes: list[int]) -> None:
    whole = joined(pieces_of(cut(text, sizes)))
    assert list(whole.offsets) == sorted(whole.offsets)
    for idx, char in enumerate(whole.text):
        own = bytes(byte for byte, offset in zip(text, whole.offsets, strict=True) if offset == idx)
        assert own and own.decode(errors="replace") == char


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        (b"\xe2A", [0, 1]),
        (b"\xe2\xe2\x82\xacA", [0, 1, 1, 1, 2]),
        (b"\xf0\x90A\xff", [0, 0, 1, 2]),
        (b"\xed\xa0", [0, 1]),
        (b"\xed\xa0\x80A", [0, 1, 2, 3]),
    ],
)
def test_offsets_of_bytes_that_are_no_text_point_to_their_replacement(text: bytes, offsets: list[int]) -> None:
    assert list(joined(pieces_of([text])).offsets) == offsets


@given(
    st.lists(st.sampled_from([b"a", b"b", b"\xc3\xa9", b"\n"]), max_size=20).map(b"".join),
    SIZES,
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"aab", b"\xc3\xa9", b"b\xc3\xa9a"]), max_size=4),
)
def test_a_text_ends_before_the_stop_that_is_complete_first(text: bytes, sizes: list[int], stops: list[bytes]) -> None:
    expected, reason = text, "length"
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            expected, reason = text[: end - max(map(len, found))], "stop"
            break
    pieces = pieces_of(cut(text, sizes), stops)
    whole = joined(pieces)
    assert (whole.text, whole.finish_reason) == (expected.decode(errors="replace"), reason)
    assert len(whole.tokens) == len(expected)


def test_what_may_begin_a_stop_is_held_back_and_then_let_go() -> None:
    texts = [piece.text for piece in pieces_of([b"xab", b"a", b"b", b"d", b"ab"], [b"abac", b"bd!"])]
    assert texts == ["x", "", "ab", "a", "bd", "ab"]


def test_echoed_text_comes_once_and_before_all() -> None:
    assert [piece.text for piece in pieces_of([b"c", b"d"], echoed="ab")] == ["abc", "d", ""]
    assert [piece.text for piece in pieces_of([], echoed="ab")] == ["ab"]


def test_tokens_and_logprobs_are_those_of_single_bytes() -> None:
    transcript = Transcript()
    piece = transcript.add(Decision((0x41, 0xE2, 0x0A), (1.0, 0.25, 0.0)))
    assert piece.tokens == ("A", "bytes:\\xe2", "\n")
    assert piece.logprobs == (0.0, math.log(0.25), math.log(2.0**-149))


def test_an_answer_holds_what_clients_read() -> None:
    envelope = Envelope("cmpl-1", 5, "m", "v", 7, True)
    piece = Piece("a", ("a",), (-0.5,), (0,), "length")
    assert json.loads(json.dumps(envelope.answer([(1, piece)], usage_of(2, 3)))) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "v",
        "seed": 7,
        "choices": [
            {
                "text": "a",
                "index": 1,
                "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0], "top_logprobs": None},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }
    bare = Envelope("cmpl-1", 5, "m", "v", 7, False).answer([(0, piece)])
    assert bare["choices"][0]["logprobs"] is None and "usage" not in bare

"""Streamed text equals text decoded at once, and no stop string ever leaks, however the bytes are cut.

Method: hypothesis cuts random bytes and texts anywhere; the expectation is stated on the whole text.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text import StopScanner, TextStream, Utf8Decoder

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
bits = st.lists(st.binary(min_size=1, max_size=4), max_size=30)
few_letters = st.text("abX😀", max_size=40)
stops = st.lists(st.text("abX😀", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(data, text):
    """Cuts `text` (str or bytes) at random places."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The law on the whole text: character by character until some stop string is complete."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(bits=bits)
def test_any_bytes_join_to_what_decoding_at_once_gives(bits):
    decoder = Utf8Decoder()
    assert "".join([*map(decoder.push, bits), decoder.end()]) == b"".join(bits).decode("utf-8", "replace")


@given(data=st.data(), text=texts)
def test_a_cut_code_point_is_held_back_and_never_replaced(data, text):
    decoder, sent = Utf8Decoder(), ""
    for piece in pieces_of(data, text.encode()):
        sent += decoder.push(piece)
        assert text.startswith(sent)
    assert sent == text and decoder.end() == ""


@given(data=st.data(), text=few_letters, stops=stops)
def test_stop_strings_cut_where_the_first_is_complete(data, text, stops):
    scanner, sent = StopScanner(stops), ""
    for piece in pieces_of(data, text):
        sent += scanner.push(piece)
        assert not any(stop in sent for stop in stops)
    sent += scanner.end()
    assert sent == cut_at_stop(text, stops)
    assert (scanner.found is not None) == any(stop in text for stop in stops)


@given(data=st.data(), text=few_letters, stops=stops)
def test_nothing_is_held_longer_than_a_stop_string_may_need(data, text, stops):
    scanner, sent = StopScanner(stops), ""
    for piece in pieces_of(data, text):
        sent += scanner.push(piece)
    if scanner.found is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(data=st.data(), text=few_letters, stops=st.one_of(st.just([]), stops))
def test_bytes_and_stop_strings_together(data, text, stops):
    stream, sent = TextStream(stops), ""
    for piece in pieces_of(data, text.encode()):
        sent += stream.push(piece)
    assert sent + stream.end() == cut_at_stop(text, stops)


def test_an_unfinished_code_point_before_a_stop_string_ends_as_replacement():
    stream = TextStream(["END"])
    assert stream.push("é".encode()[:1]) == ""
    assert stream.push(b"EN") == "�"
    assert stream.push(b"D after") == ""
    assert stream.stopped and stream.end() == ""

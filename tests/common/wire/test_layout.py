"""Layouts written as text: sizes, padding, and values that do not fit refused; payloads that compare by content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.layout import FieldError, Layout, Payload


def test_records_are_packed_little_endian_without_padding():
    layout = Layout("u8 a, u32 b, u16 c, char d[3], u8 e[2], i32 f[2]")
    assert layout.size == 1 + 4 + 2 + 3 + 2 + 8
    data = layout.pack((1, 2, 3, "é", b"xy", (-1, 5)))
    assert data == b"\x01\x02\0\0\0\x03\0\xc3\xa9\0xy\xff\xff\xff\xff\x05\0\0\0"
    assert layout.unpack(memoryview(data)) == [1, 2, 3, "é", b"xy", (-1, 5)]


@pytest.mark.parametrize("line", ["u33 a", "u32", "char a", "u32 a; u32 b", "u32  a", "u32 A"])
def test_lines_that_are_no_layout(line):
    with pytest.raises(ValueError, match="not a field"):
        Layout(line)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("u8 a", 256),
        ("u32 a", -1),
        ("i32 a", 2**31),
        ("char a[2]", "abc"),
        ("char a[4]", "a\0b"),
        ("u8 a[2]", b"x"),
    ],
)
def test_values_that_do_not_fit(line, value):
    with pytest.raises(FieldError):
        Layout(line).pack((value,))


def test_text_that_is_not_utf8():
    with pytest.raises(FieldError, match="UTF-8"):
        Layout("char a[2]").unpack(memoryview(b"\xff\xfe"))


@given(st.binary(max_size=50), st.lists(st.integers(0, 50), max_size=5))
def test_a_payload_is_its_bytes_however_cut(data, cuts):
    places = sorted(min(cut, len(data)) for cut in cuts)
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    assert Payload(*pieces) == Payload(data)
    assert hash(Payload(*pieces)) == hash(Payload(data))
    assert bytes(Payload(*pieces).joined()) == data
    assert Payload(data, b"!") != Payload(data)


def test_a_payload_is_a_view_of_what_it_is_given():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    payload = Payload(array, np.empty((0, 3), np.float32))
    assert payload.n_bytes == 24 and len(payload.parts) == 1
    array[0, 0] = 9
    assert np.frombuffer(payload.joined(), np.float32)[0] == 9

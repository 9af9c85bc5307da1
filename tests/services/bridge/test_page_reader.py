"""Aim: pages are read ahead whole and in order, or fail by name, and no buffer is ever lost.

Method: the reader's real thread over a file of random pages; this test takes pieces as the page pump does.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash

from common.errors import HashMismatchError, ServiceError
from common.limits import APPEND_PIECE_BYTES
from common.wire import held as h
from services.bridge.page_pieces import Pieces
from services.bridge.page_reader import BUFFERS, PageReader

FORM = h.PageForm((0, 1), 4, 1, 256, 1024, 1, "a model")
N_PIECES = -(-FORM.image_bytes // APPEND_PIECE_BYTES)


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    return [rng.bytes(FORM.image_bytes) for _ in range(4)]


@pytest.fixture
def places(tmp_path, images):
    stride = -(-FORM.image_bytes // 4096) * 4096
    with (tmp_path / "journal").open("wb") as file:
        for number, image in enumerate(images):
            file.seek(number * stride)
            file.write(image)
    return [
        h.PagePlace(
            number % 2,
            number // 2,
            str(tmp_path / "journal"),
            number * stride,
            xxhash.xxh3_64_intdigest(image),
        )
        for number, image in enumerate(images)
    ]


@pytest.fixture
def reader():
    reader = PageReader()
    yield reader
    reader.stop()


def pieces_of(place, reader, came=lambda: None):
    return Pieces(place, FORM, reader, came)


def taken(pieces):
    """The next piece, once it is there."""
    until = time.monotonic() + 20
    while (found := pieces.next()) is None:
        assert time.monotonic() < until, "no piece came"
        time.sleep(0.001)
    return found


def whole(pieces, reader):
    data = b""
    while not pieces.done:
        frame, buffer = taken(pieces)
        assert frame.offset == len(data)
        data += bytes(frame.piece.joined())
        reader.give_back(buffer)
    pieces.close()
    return data


def test_pages_come_whole_and_in_order_and_buffers_are_used_again(places, images, reader):
    opened = [pieces_of(place, reader) for place in places]
    assert N_PIECES * len(places) > BUFFERS, "not all fit"
    for image, pieces in zip(images, opened, strict=True):
        assert whole(pieces, reader) == image


def test_what_was_not_there_is_told_when_it_comes(places, reader):
    told = []
    pieces = pieces_of(places[0], reader, came=lambda: told.append(time.monotonic()))
    while pieces.next() is not None:  # the thread may have been quicker
        pass
    until = time.monotonic() + 20
    while not told and not pieces.done and time.monotonic() < until:
        time.sleep(0.001)
    assert told or pieces.done
    pieces.close()


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_page_that_is_given_up_holds_no_buffer(places, images, reader, when):
    for _ in range(2 * BUFFERS):
        pieces = pieces_of(places[0], reader)
        if when == "between":
            _, buffer = taken(pieces)
            reader.give_back(buffer)
        pieces.close()
    assert whole(pieces_of(places[1], reader), reader) == images[1]


def test_a_page_of_other_bytes_never_leaves_whole(places, images, reader):
    damaged = h.PagePlace(0, 0, places[0].path, places[0].offset, places[0].xxh3 ^ 1)
    for _ in range(BUFFERS):
        pieces = pieces_of(damaged, reader)
        with pytest.raises(HashMismatchError, match="does not have its hash"):
            whole(pieces, reader)
        assert not pieces.done
        pieces.close()
    assert whole(pieces_of(places[3], reader), reader) == images[3]


def test_files_that_do_not_hold_the_page_are_refused_and_a_new_one_in_their_place_is_read(
    tmp_path, places, images, reader
):
    path = tmp_path / "journal"
    assert whole(pieces_of(places[0], reader), reader) == images[0]
    whole_file = path.read_bytes()
    path.unlink()
    for make, message in (
        (lambda: None, "cannot read"),
        (lambda: path.symlink_to("/dev/zero"), "cannot read"),
        (lambda: path.write_bytes(whole_file[: places[1].offset + 5]), "is not in it"),
    ):
        make()
        pieces = pieces_of(places[1], reader)
        with pytest.raises(ServiceError, match=message):
            taken(pieces)
        pieces.close()
        path.unlink(missing_ok=True)
    path.write_bytes(whole_file)
    assert whole(pieces_of(places[1], reader), reader) == images[1]

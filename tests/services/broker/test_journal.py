"""Aim: what was kept is found again by its token ids after any end of the process, and nothing damaged is ever offered.

Method: real files; a second journal on the same folder is the next life. Damage is done to the files between the two.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.broker.chain import page_keys, state_key
from services.broker.journal import Journal
from services.broker.journal_files import JournalError
from services.broker.records import BLOCK, padded
from tests.services.broker.pages import FORM, ids_of, image_of

MIB = 1 << 20
IDS = ids_of(64 * 4)


def keep(journal: Journal, ids=IDS, *, conversation=1, form=FORM, seed=0):
    """All full pages of `ids` in all layers."""
    places = []
    for page, key in enumerate(page_keys(form, ids)):
        mine = ids[page * form.page_tokens : (page + 1) * form.page_tokens]
        for layer in form.layers:
            parts = [memoryview(part) for part in image_of(layer, page, seed)]
            places.append(journal.keep_page(conversation, form, layer, page, key, mine, parts))
    return places


def read(place):
    with Path(place.path).open("rb") as file:
        file.seek(place.offset)
        return file.read(FORM.image_bytes)


@pytest.mark.parametrize("fsync", ["off", "file", "page"])
def test_pages_come_back_in_the_next_life_by_their_token_ids(tmp_path, fsync):
    first = Journal(tmp_path / "j", 64 * MIB, fsync)
    places = keep(first)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    assert all(place.offset % 4096 == 0 for place in places)
    del first  # never closed: as after SIGKILL
    journal = Journal(tmp_path / "j", 64 * MIB, fsync)
    assert journal.find_pages(FORM, IDS) == places and journal.damaged == 0
    assert [read(place) for place in places[:2]] == [b"".join(image_of(layer, 0)) for layer in FORM.layers]


def test_the_longest_common_prefix_is_found(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    places = keep(journal)
    edited = IDS.copy()
    edited[64 * 2 + 5] += 1
    assert journal.find_pages(FORM, edited) == places[:4]
    assert journal.find_pages(FORM, IDS[:130]) == places[:4]
    assert journal.find_pages(FORM, ids_of(300, seed=9)) == []


def test_pages_of_another_form_are_never_offered(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    keep(journal)
    for change in ({"model": "other"}, {"head_dim": 64}, {"many_rows": "products"}):
        assert journal.find_pages(msgspec.structs.replace(FORM, **change), IDS) == []


def test_a_page_kept_again_counts_from_then_on(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    old, new = keep(journal), keep(journal, seed=1)
    assert journal.find_pages(FORM, IDS) == new != old
    assert Journal(tmp_path, 64 * MIB).find_pages(FORM, IDS) == new


@pytest.mark.parametrize("how", ["altered", "cut off", "removed"])
def test_a_page_that_is_kept_again_is_written_anew_where_the_first_copy_is_no_more(tmp_path, how):
    """The host frees its memory once it was told a place: there must be a page."""
    journal = Journal(tmp_path, 64 * MIB)
    old = keep(journal)
    path = Path(old[0].path)
    if how == "removed":
        path.unlink()
    elif how == "cut off":
        os.truncate(path, old[2].offset)
    else:
        path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()))
    new = keep(journal)
    right = [b"".join(image_of(place.layer, place.page)) for place in new]
    assert [read(place) for place in new] == right
    assert journal.find_pages(FORM, IDS) == new


def test_void_pages_stay_void(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    places = keep(journal)
    journal.void(places[4:], lambda place: False)
    assert journal.find_pages(FORM, IDS) == places[:4]
    assert Journal(tmp_path, 64 * MIB).find_pages(FORM, IDS) == places[:4]


def test_a_state_comes_back_with_its_tokens_only(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    for n in (64, 128, 192):
        journal.keep_state(FORM, state_key(FORM, IDS[:n]), IDS[:n], memoryview(b"state" * n))
    journal = Journal(tmp_path, 64 * MIB)
    position, place, n_bytes = journal.find_state(FORM, IDS, 191)
    assert (position, n_bytes, place.offset % 4096) == (128, 640, 0)
    with Path(place.path).open("rb") as file:
        file.seek(place.offset)
        assert file.read(n_bytes) == b"state" * 128
    assert journal.find_state(FORM, IDS, 63) is None
    assert journal.find_state(FORM, ids_of(300, seed=3), 300) is None


def test_few_states_are_kept(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    for n in range(10, 20):
        journal.keep_state(FORM, state_key(FORM, IDS[:n]), IDS[:n], memoryview(b"s"))
    assert len(list(tmp_path.iterdir())) == 4
    assert journal.find_state(FORM, IDS, 15) is None and journal.find_state(FORM, IDS, 16)[0] == 16


STRIDE = BLOCK + padded(4 * FORM.page_tokens) + padded(FORM.image_bytes)


@pytest.mark.parametrize(
    ("damage", "pages_left"),
    [
        (lambda data: data[: BLOCK + 5 * STRIDE + 100], 2),  # torn in a head
        (lambda data: data[: BLOCK + 5 * STRIDE + BLOCK + 9], 2),  # torn behind a head
        (lambda data: flipped(data, BLOCK + 4 * STRIDE + 30), 2),  # a head
        (lambda data: flipped(data, BLOCK + 6 * STRIDE + 2 * BLOCK + 77), 3),  # an image
        (lambda data: flipped(data, BLOCK + 2 * STRIDE + BLOCK + 3), 1),  # token ids
        (lambda data: flipped(data, 3), 0),  # the file's version
        (lambda data: flipped(data, 100), 0),  # its form
        (lambda data: data[:100], 0),
        (lambda data: b"", 0),
    ],
)
def test_damage_is_told_and_cuts_off_what_cannot_be_trusted(tmp_path, damage, pages_left):
    first = Journal(tmp_path, 64 * MIB)
    places = keep(first)
    first.close()
    path = next(tmp_path.iterdir())
    path.write_bytes(damage(path.read_bytes()))
    journal = Journal(tmp_path, 64 * MIB)
    assert journal.find_pages(FORM, IDS) == places[: 2 * pages_left]
    assert journal.damaged > 0
    again = keep(journal)  # and it takes pages again
    assert journal.find_pages(FORM, IDS) == again


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def test_files_are_dropped_by_last_use_and_never_those_in_use(tmp_path):
    used: set[str] = set()
    journal = Journal(tmp_path, MIB, in_use=lambda: used, segment_bytes=MIB // 4)
    by_seed = {}
    for seed in range(3):
        by_seed[seed] = keep(journal, ids_of(256, seed), conversation=seed)
        journal.end_conversation(seed)
        os.utime(by_seed[seed][0].path, (1000 + seed, 1000 + seed))
    journal = Journal(tmp_path, MIB, in_use=lambda: used, segment_bytes=MIB // 4)
    used |= {place.path for place in by_seed[0]}
    for seed in range(3, 30):
        keep(journal, ids_of(256, seed), conversation=seed)
        journal.end_conversation(seed)
        assert journal.n_bytes <= MIB
    assert journal.dropped_files > 0
    assert journal.find_pages(FORM, ids_of(256, 0)) == by_seed[0]
    assert journal.find_pages(FORM, ids_of(256, 1)) == []


def test_a_full_journal_refuses_and_keeps_what_it_has(tmp_path):
    used: set[str] = set()
    journal = Journal(tmp_path, MIB, in_use=lambda: used, segment_bytes=MIB // 4)
    kept = []
    with pytest.raises(JournalError, match="OUTRIGGER_JOURNAL_MIB") as caught:
        for page, key in enumerate(page_keys(FORM, long := ids_of(64 * 100))):
            mine = long[page * 64 : (page + 1) * 64]
            for layer in FORM.layers:
                parts = [memoryview(part) for part in image_of(layer, page)]
                kept.append(journal.keep_page(1, FORM, layer, page, key, mine, parts))
                used.add(kept[-1].path)
    assert caught.value.cause == "journal_full" and journal.room_bytes() < STRIDE + BLOCK
    whole = len(kept) // 2 * 2
    assert journal.find_pages(FORM, long) == kept[:whole]


def test_a_full_disk_refuses_and_keeps_what_it_has(tmp_path):
    journal = Journal(tmp_path, 64 * MIB)
    places = keep(journal, IDS[:128])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 5 * STRIDE, before[1]))
    try:
        with pytest.raises(JournalError, match="OUTRIGGER_JOURNAL_DIR") as caught:
            keep(journal, IDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert caught.value.cause == "disk_full"
    assert len(journal.find_pages(FORM, IDS)) == len(places)
    assert len(Journal(tmp_path, 64 * MIB).find_pages(FORM, IDS)) == len(places)
    assert len(keep(journal, IDS)) == len(journal.find_pages(FORM, IDS)) == 8


WRITER = """
import sys
from pathlib import Path
from services.broker.journal import Journal
from tests.services.broker.pages import FORM, ids_of
from tests.services.broker.test_journal import keep
journal = Journal(Path(sys.argv[1]), 64 << 20)
for seed in range(1000):
    keep(journal, ids_of(256, seed), conversation=seed)
    print(seed, flush=True)
"""


def test_a_writer_killed_at_any_time_loses_nothing_that_it_said_was_kept(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(20)]
        writer.kill()
        said += [int(line) for line in writer.stdout.read().split()]
    journal = Journal(tmp_path, 64 * MIB)
    assert all(len(journal.find_pages(FORM, ids_of(256, seed))) == 8 for seed in said)

"""A journal seen from outside: what is on disk, who holds its lock, and what of it cannot be.

Method: a real journal of the broker in a folder, and its real lock.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.bench.drill.journal import JournalState, look_at
from services.broker.chain import page_keys
from services.broker.journal import Journal
from services.broker.journal_lock import claim
from tests.services.broker.pages import FORM, ids_of, image_of


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert look_at(tmp_path / "none") == JournalState(0, 0, False)


def test_files_bytes_and_lock_are_those_of_the_broker(tmp_path: Path) -> None:
    lock = claim(tmp_path)
    journal = Journal(tmp_path, 1 << 30)
    ids = ids_of(FORM.page_tokens)
    (key,) = page_keys(FORM, ids)
    journal.keep_page(1, FORM, FORM.layers[0], 0, key, ids, list(map(memoryview, image_of(1, 0))))
    seen = look_at(tmp_path)
    assert (seen.n_files, seen.n_bytes, seen.is_locked) == (1, journal.n_bytes, True)
    assert seen.wrong(journal.n_bytes, 1 << 30) == []
    assert "knows of 7" in seen.wrong(7, 1 << 30)[0]
    assert "may have 8" in seen.wrong(journal.n_bytes, 8)[0]
    journal.close()
    os.close(lock)
    assert not look_at(tmp_path).is_locked
    assert "lock" in look_at(tmp_path).wrong(seen.n_bytes, 1 << 30)[0]

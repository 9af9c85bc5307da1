"""The journal: a copy of every page that was kept, in files on disk, found again by content. One thread at a time.

Files belong to one conversation's life and are only ever appended to (records.py says how they look), so that whoever
mapped a page keeps it, whatever happens here. `Journal(...)` looks through what earlier lives left: a file of another
version is dropped, a torn tail or a damaged head is told and not used. An image is hashed when its page is offered
again. Files go by last use, whole, when the cap is reached; never one that is in use.

Knows no conversation's state and sends nothing: broker.py says what is in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import xxhash

from common.errors import OutriggerError
from common.log import get_log
from common.wire.held import PageForm, PagePlace
from services.broker import records
from services.broker.chain import Ids, Key, form_bytes, form_key, next_key, page_keys
from services.broker.journal_files import (
    File,
    JournalError,
    Kept,
    bytes_of,
    hash_of,
    read_file,
    reason_of,
    write,
)
from services.broker.records import BLOCK, Head, encode_head

SEGMENT_BYTES = 256 << 20
"""A file takes pages until it has this many bytes: what is dropped, and forced to disk, at once."""
STATES_MAX = 4
"""Recurrent states kept for one form; the oldest goes first."""

Fsync = Literal["off", "file", "page"]
log = get_log()


class Journal:
    """All files of one directory. Raises JournalError when something cannot be kept, OSError when it cannot be read."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        fsync: Fsync = "file",
        *,
        in_use: Callable[[], set[str]] = set,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory, self.bytes_max, self.fsync = directory, bytes_max, fsync
        self.in_use = in_use
        self.damaged = 0
        """Heads, tails and images that were found damaged."""
        self.dropped_files = 0
        self._segment_bytes = segment_bytes
        self._pages: dict[tuple[Key, int], Kept] = {}
        self._states: dict[Key, Kept] = {}
        self._files: dict[str, File] = {}
        self._writing: dict[tuple[int, bytes], File] = {}
        self._serial = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        for path in sorted(directory.glob("*.journal")):
            self._look_through(path)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files. Any thread may ask: it is a copy that is gone through."""
        return sum(file.n_bytes for file in list(self._files.values()))

    def room_bytes(self) -> int:
        """What can still be kept, when every file goes that is not in use."""
        in_use = self.in_use()
        pinned = sum(file.n_bytes for path, file in self._files.items() if path in in_use)
        try:
            disk = os.statvfs(self.directory)
        except OSError:  # somebody removed the folder; broker.py notices and begins anew
            return 0
        return max(0, min(self.bytes_max - pinned, disk.f_bavail * disk.f_frsize + self.n_bytes - pinned))

    # --- keeping

    def keep_page(
        self,
        conversation: int,
        form: PageForm,
        layer: int,
        page: int,
        key: Key,
        ids: Ids,
        parts: Iterable[memoryview],
    ) -> PagePlace:
        """Append the page of one layer; `parts` are its image's bytes, in order. Raises JournalError."""
        at = conversation, form_key(form)
        head = self._head(records.PAGE, at[1], key, layer, page, ids, parts := list(parts))
        known = self._pages.get((key, layer))
        same = known is not None and known.head.image_xxh3 == head.image_xxh3
        if same and (whole := self._good((key, layer), ids)):
            return whole.place()  # these very bytes are here, and still are: the host may let its own go
        file = self._writing.get(at)
        if file is not None and (
            file.n_bytes + head.record_bytes > self._segment_bytes or not file.is_in_its_folder
        ):
            self._finish(file)
            file = None
        if file is None:
            file = self._writing[at] = self._new_file(form, head.record_bytes)
        kept = self._append(file, head, ids, parts)
        self._take(kept)
        return kept.place()

    def keep_state(self, form: PageForm, key: Key, ids: Ids, blob: memoryview) -> None:
        """Keep a recurrent state: a file of its own; the oldest ones of this form go. Raises JournalError."""
        head = self._head(records.STATE, form_key(form), key, 0, 0, ids, [blob])
        file = self._new_file(form, head.record_bytes)
        kept = self._append(file, head, ids, [blob])
        self._finish(file)
        self._take(kept)
        mine = [each for each in self._states.values() if each.file.form == head.form]
        for old in sorted(mine, key=lambda each: each.head.serial)[:-STATES_MAX]:
            self._drop(old.file)

    def void(self, places: Iterable[PagePlace], still_used: Callable[[PagePlace], bool]) -> None:
        """These pages are not what they were: never offer them again, unless an open conversation still uses them."""
        at = {(str(kept.file.path), kept.place().offset): (key, kept) for key, kept in self._pages.items()}
        for place in places:
            found = at.get((place.path, place.offset))
            if found is None or still_used(place):
                continue
            key, kept = found
            with suppress(OSError):
                fd = os.open(kept.file.path, os.O_WRONLY)
                try:
                    os.pwrite(fd, encode_head(replace(kept.head, kind=records.VOID)), kept.offset)
                finally:
                    os.close(fd)
            self._forget(key)

    def sync(self) -> None:
        """Force to disk what was not forced yet, as the setting says."""
        if self.fsync == "file":
            for file in list(self._writing.values()):
                self._force(file)

    def close(self) -> None:
        """End all files; a folder in which nothing was kept goes, too."""
        for file in list(self._writing.values()):
            self._finish(file)
        with suppress(OSError):
            self.directory.rmdir()

    # --- finding

    def find_pages(self, form: PageForm, ids: Ids) -> list[PagePlace]:
        """Full pages of the longest prefix of `ids` that is here whole, in every layer; each image was hashed."""
        found: list[PagePlace] = []
        for page, key in enumerate(page_keys(form, ids)):
            mine = ids[page * form.page_tokens : (page + 1) * form.page_tokens]
            whole = [self._good((key, layer), mine) for layer in form.layers]
            if not all(whole):
                break
            found += [kept.place() for kept in whole if kept]
        for path in {place.path for place in found}:
            self._use(self._files[path])
        return found

    def find_state(self, form: PageForm, ids: Ids, n_tokens: int) -> tuple[int, PagePlace, int] | None:
        """(position, place, bytes) of the newest state of a prefix of `ids`, at most n_tokens long; it was hashed."""
        of_form = form_key(form)
        mine = [kept for kept in self._states.values() if kept.head.form == of_form]
        for kept in sorted(mine, key=lambda each: -each.head.ids_bytes):
            position = kept.head.ids_bytes // 4
            if position > min(n_tokens, len(ids)) or next_key(of_form, ids[:position]) != kept.head.key:
                continue
            if self._is_whole(kept, ids[:position]):
                self._use(kept.file)
                return position, kept.place(), kept.head.image_bytes
            self._drop(kept.file)
        return None

    def is_intact(self, place: PagePlace, n_bytes: int) -> bool:
        """Whether the image at `place` still is what it was."""
        try:
            return hash_of(Path(place.path), place.offset, n_bytes) == place.xxh3
        except OSError:
            return False

    def drop_damaged(self, place: PagePlace) -> None:
        """A page is not what it was: it is told, and offered no more."""
        self._tell_damage(Path(place.path), f"page {place.page} of layer {place.layer}: its bytes changed")
        self.void([place], lambda _place: False)

    def _good(self, at: tuple[Key, int], ids: Ids) -> Kept | None:
        kept = self._pages.get(at)
        if kept is not None and not self._is_whole(kept, ids):
            self._forget(at)
            kept = None
        return kept

    def _is_whole(self, kept: Kept, ids: Ids) -> bool:
        place = kept.place()
        try:
            fd = os.open(kept.file.path, os.O_RDONLY)
            try:
                same = os.pread(fd, kept.head.ids_bytes, kept.offset + BLOCK) == bytes_of(ids)
            finally:
                os.close(fd)
            if same and hash_of(kept.file.path, place.offset, kept.head.image_bytes) == place.xxh3:
                return True
            why = "its bytes are not those that were kept"
        except OSError as error:
            why = str(error)
        self._tell_damage(kept.file.path, f"page {place.page} of layer {place.layer}: {why}")
        return False

    # --- files

    def _head(
        self, kind: int, form: bytes, key: Key, layer: int, page: int, ids: Ids, parts: list[memoryview]
    ) -> Head:
        hasher = xxhash.xxh3_64()
        for part in parts:
            hasher.update(part)
        self._serial += 1
        n_bytes = sum(part.nbytes for part in parts)
        return Head(kind, form, key, layer, page, 4 * len(ids), n_bytes, hasher.intdigest(), self._serial)

    def _new_file(self, form: PageForm, record_bytes: int) -> File:
        """Begin a file; its name tells when."""
        self._serial += 1
        self._make_room(BLOCK + record_bytes, keep=None)
        path = self.directory / f"{os.urandom(4).hex()}-{self._serial:012x}.journal"
        head = Head(records.FILE, form_key(form), text=form_bytes(form), serial=self._serial)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            file = File(path, head.form, 0, 0.0, fd)
            self._files[str(path)] = file
            write(fd, encode_head(head), 0)
            file.n_bytes = BLOCK
        except OSError as error:
            if str(path) in self._files:
                self._drop(self._files[str(path)])
            raise reason_of(error, path) from error
        self._use(file)
        return file

    def _append(self, file: File, head: Head, ids: Ids, parts: list[memoryview]) -> Kept:
        """Ids and image first, then the head that says they are there."""
        self._make_room(head.record_bytes, keep=file)
        at, offset = file.n_bytes, file.n_bytes + head.image_offset
        try:
            os.ftruncate(file.fd, at + head.record_bytes)
            if hasattr(
                os, "posix_fallocate"
            ):  # a disk that is full says so now, and not when the page is mapped
                os.posix_fallocate(file.fd, at, head.record_bytes)
            write(file.fd, bytes_of(ids), at + BLOCK)
            for part in parts:
                write(file.fd, part, offset)
                offset += part.nbytes
            write(file.fd, encode_head(head), at)
            file.n_bytes, file.dirty = at + head.record_bytes, True
            if self.fsync == "page":
                self._force(file)
        except OSError as error:
            file.n_bytes = at
            with suppress(OSError):
                os.ftruncate(file.fd, at)
            raise reason_of(error, file.path) from error
        self._use(file)
        return Kept(file, at, head)

    def _make_room(self, n_bytes: int, keep: File | None) -> None:
        """Drop files by last use until n_bytes more fit the cap. Raises JournalError when those in use fill it."""
        in_use = self.in_use()
        while self.n_bytes + n_bytes > self.bytes_max:
            busy = {id(file) for file in self._writing.values()}
            free = [
                file
                for path, file in self._files.items()
                if path not in in_use and file is not keep and id(file) not in busy
            ]
            if not free:
                raise JournalError(
                    f"the journal is full: {self.n_bytes >> 20} MiB are in use and its cap is {self.bytes_max >> 20} "
                    f"MiB (OUTRIGGER_JOURNAL_MIB); {n_bytes} bytes more do not fit",
                    "journal_full",
                )
            self._drop(min(free, key=lambda file: file.last_use))

    def _look_through(self, path: Path) -> None:
        """Take what a file of an earlier life has; one that cannot be used is dropped."""
        try:
            file, found, damage = read_file(path)
        except (OutriggerError, OSError) as error:
            self._tell_damage(path, f"{error}; it is dropped")
            with suppress(OSError):
                path.unlink()
            return
        self._files[str(path)] = file
        for what in damage:
            self._tell_damage(path, what)
        for kept in found:
            self._serial = max(self._serial, kept.head.serial)
            self._take(kept) if kept.head.kind != records.VOID else None

    def _take(self, kept: Kept) -> None:
        """Know a record, unless a later one of the same content is known."""
        if kept.head.kind == records.STATE:
            self._states[kept.head.key] = kept
            return
        at = kept.head.key, kept.head.layer
        known = self._pages.get(at)
        if known is None or known.head.serial < kept.head.serial:
            if known is not None:
                known.file.keys.discard(at)
            self._pages[at] = kept
            kept.file.keys.add(at)

    def _forget(self, at: tuple[Key, int]) -> None:
        if (kept := self._pages.pop(at, None)) is not None:
            kept.file.keys.discard(at)

    def _use(self, file: File) -> None:
        """Its time of change is its last use, so that a next life of the broker knows, too."""
        with suppress(OSError):
            os.utime(file.path)
            file.last_use = os.stat(file.path).st_mtime

    def _force(self, file: File) -> None:
        if file.dirty:
            os.fsync(file.fd)
            file.dirty = False

    def _finish(self, file: File) -> None:
        """It takes no more records."""
        if self.fsync != "off":
            self._force(file)
        self._writing = {at: each for at, each in self._writing.items() if each is not file}
        os.close(file.fd)
        file.fd = -1

    def end_conversation(self, conversation: int) -> None:
        """Nothing more is written for it."""
        for at, file in list(self._writing.items()):
            if at[0] == conversation:
                self._finish(file)

    def _drop(self, file: File) -> None:
        log.info("journal file dropped", file=file.path.name, mib=file.n_bytes >> 20)
        if file.fd >= 0:
            self._writing = {at: each for at, each in self._writing.items() if each is not file}
            os.close(file.fd)
            file.fd = -1
        for at in list(file.keys):
            self._forget(at)
        self._states = {key: kept for key, kept in self._states.items() if kept.file is not file}
        self._files.pop(str(file.path), None)
        self.dropped_files += 1
        with suppress(OSError):
            file.path.unlink()

    def _tell_damage(self, path: Path, what: str) -> None:
        self.damaged += 1
        log.warning("journal damaged", file=path.name, what=what)

"""CURVE keys in files, as `outrigger keys new` writes them: one z85 key of 40 characters a line. What
follows a key on its line is a comment, and so is a line that begins with #.

Called by whoever reads a setting or a flag that names such a file.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import SettingError
from services.runtime.bus import public_key_of

KEY_CHARS = 40


def read_keys(file: str, option: str) -> list[bytes]:
    """The keys in a file. `option` is the setting or flag that named it. Raises SettingError."""
    try:
        text = Path(file).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{option} = {file}: cannot be read: {error}") from error
    keys = [
        words[0].encode()
        for words in map(str.split, text.splitlines())
        if words and not (words[0].startswith("#") and len(words[0]) != KEY_CHARS)  # a key may begin with #
    ]
    for key in keys:
        try:
            public_key_of(key)  # any key's form will do: this says whether it is one
        except ValueError:
            raise SettingError(
                f"{option} = {file}: a key has 40 characters, as `outrigger keys new` writes them; found a line of "
                f"{len(key)}"
            ) from None
    return keys


def read_key(file: str, option: str) -> bytes:
    """The one key in a file. Raises SettingError."""
    keys = read_keys(file, option)
    if len(keys) != 1:
        raise SettingError(f"{option} = {file}: it holds {len(keys)} keys; one is needed")
    return keys[0]

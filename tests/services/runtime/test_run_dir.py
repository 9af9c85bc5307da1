"""Aim: the run directory is made private, and one that is not private or not ours is refused.

Method: real directories, with loose modes and umasks.
"""

from __future__ import annotations

import os
import stat

import pytest

from common.errors import SettingError
from services.runtime.run_dir import open_run_dir


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_is_made_private_whatever_the_umask(run_dir, umask):
    old = os.umask(umask)
    try:
        made = open_run_dir(run_dir / "outrigger-1" / "abcd")
    finally:
        os.umask(old)
    assert mode(made) == mode(made.parent) == 0o700
    assert open_run_dir(made) == made


def test_a_parent_with_our_name_that_others_can_enter_is_refused(run_dir):
    (run_dir / "outrigger-1").mkdir(mode=0o755)
    os.chmod(run_dir / "outrigger-1", 0o755)
    with pytest.raises(SettingError, match=r"outrigger-1 has mode 0755"):
        open_run_dir(run_dir / "outrigger-1" / "abcd")


def test_a_parent_that_is_a_link_is_refused(run_dir):
    (run_dir / "elsewhere").mkdir(mode=0o700)
    (run_dir / "outrigger-1").symlink_to(run_dir / "elsewhere")
    with pytest.raises(SettingError, match="links are refused"):
        open_run_dir(run_dir / "outrigger-1" / "abcd")


def test_a_place_where_nothing_can_be_made_is_named(run_dir):
    (run_dir / "file").touch()
    with pytest.raises(SettingError, match=r"cannot make .*OUTRIGGER_RUN_DIR"):
        open_run_dir(run_dir / "file" / "abcd")

"""Folders that only their owner may use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from canary_obs.transport.private_folder import make_private_folder


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_missing_parents_are_private_too(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "a" / "b" / "c"
    before = os.umask(umask)
    try:
        make_private_folder(folder)
        make_private_folder(folder)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent, folder.parent.parent)]
    assert modes == [0o700] * 3


def test_what_exists_is_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    make_private_folder(shared / "own")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (shared / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(shared / "file")

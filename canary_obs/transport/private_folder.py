"""Folders that only their owner may use."""

from __future__ import annotations

from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each with mode 0700 whatever the umask.

    Raises OSError. `Path.mkdir` gives the parents it creates what the umask leaves: others could enter them.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # raises where it is not a folder

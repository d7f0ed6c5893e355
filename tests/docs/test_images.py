"""The pictures of the documents: each is shown somewhere, small, and says nothing beyond what it shows."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docs/images").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LARGEST = 160_000  # bytes


def chunks_of(content: bytes) -> list[bytes]:
    """Kinds of the chunks of a PNG file."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, place = [], 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kinds.append(content[place + 4 : place + 8])
        place += 12 + length
    return kinds


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_a_picture_is_small_and_has_no_metadata(path):
    content = path.read_bytes()
    assert len(content) <= LARGEST
    assert set(chunks_of(content)) <= {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}


def test_every_picture_is_shown_and_every_shown_one_exists():
    shown = set()
    for page in PAGES:
        for name in re.findall(r"[(\"]((?:docs/)?images/[\w.]+)[)\"]", page.read_text("utf-8")):
            shown.add(page.parent / name)
    assert shown == set(IMAGES)

"""Product code uses the field's words; the private ones that they replaced must not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("canary_obs", "kernels", "dashboards", "alerts", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
# Anywhere: identifiers, comments, docstrings, texts.
EVERYWHERE = {
    "errand", "errands", "scout", "scouts", "courier", "couriers", "obey", "obeys", "obeyed", "ledger",
    "ledgers", "journal", "keyring", "allowance", "rival", "rivals", "reborn", "seam", "seams", "specimen",
    "specimens", "species", "zoo", "beside", "aside", "tell", "tells", "told", "telling", "watched",
    "overwriting", "vitals", "detour", "detours", "lend", "lends", "lent", "sidecar", "sidecars", "memo",
    "memos", "bell", "ear", "desk", "surroundings", "door", "doors", "bookkeeping",
}  # fmt: skip
# As a part of an identifier: in prose these are ordinary English.
IN_NAMES = {
    "look", "looks", "looked", "behind", "book", "books", "turn", "turns", "half", "placed", "plant",
    "planted", "gate", "feed", "feeds", "pump", "reach", "spread", "machine", "gpu_facts",
    "taken",
}  # fmt: skip
# Names that users hold (settings, label values, files) or that belong to the field.
ALLOWED = {"orders_per_minute", "ORDERS_PER_MINUTE", "_look_back", "gate", "gate_up", "machine"}
LABEL_VALUES = {'"pump"', '"mailbox"'}
_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_WORDS = re.compile(r"[A-Za-z]+")


def private_words(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each private word in a Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in ALLOWED:
            parts = {part.lower() for part in _PARTS.findall(token.string)}
            yield from ((token.start[0], word) for word in sorted(parts & (EVERYWHERE | IN_NAMES)))
        elif token.type in (tokenize.COMMENT, tokenize.STRING) and token.string not in LABEL_VALUES:
            for number, line in enumerate(token.string.splitlines()):
                found = {word.lower() for word in _WORDS.findall(line)}
                yield from ((token.start[0] + number, word) for word in sorted(found & EVERYWHERE))


@pytest.mark.parametrize("file", FILES)
def test_product_code_speaks_the_fields_words(file: str) -> None:
    assert list(private_words((ROOT / file).read_text(encoding="utf-8"))) == []


def test_private_words_are_found_where_they_hide() -> None:
    source = 'def tellState(plant_at):  # stands beside\n    """Obey."""\n    return "pump", look_up\n'
    found = {word for _, word in private_words(source)}
    assert found == {"tell", "plant", "beside", "obey", "look"}

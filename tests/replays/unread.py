"""The report of the list whose text was not at hand: nothing is replayed under its number."""

from __future__ import annotations

UNREAD = ("https://github.com/sgl-project/sglang/issues/38586",)
SEARCHED = (
    "indexes of public issues, pull requests, web pages and source text, by number, by link and by mechanism "
    "(HiCache, storage, transfers, retraction, prefix trees, drafts, states, windows, index keys, pools)"
)

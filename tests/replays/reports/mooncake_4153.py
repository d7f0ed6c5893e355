"""A page in the storage is found by a part of its tokens, and used for all of them."""

from __future__ import annotations

from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.replays.replay import Replay, Run

COMMON = list(range(20, 276))  # 16 pages
MINE, OTHER = [*COMMON, *range(300, 348)], [*COMMON, *range(300, 304), *range(500, 544)]


def perform(rig: Rig, run: Run) -> None:
    from sglang.srt.mem_cache import utils

    from tests.replays.sglang_engines import generate, stored

    native = utils.get_native_hash
    first: dict[str, str] = {}  # by hash of the pages' first four tokens: the page that was there first

    def get_native_hash(tokens: Any, prior: Any = None, page_size: int | None = None) -> Any:
        size = page_size or len(tokens)
        part = [token if place % size < 4 else 0 for place, token in enumerate(tokens)]
        pairs = native(part, prior, page_size), native(tokens, prior, page_size)
        if page_size is None:
            return pairs[1]
        return [first.setdefault(partial, whole) for partial, whole in zip(*pairs, strict=True)]

    run.patch.setattr(utils, "get_native_hash", get_native_hash)
    generate(rig, {"other": OTHER})
    stored(rig, 18)
    run.strike()
    generate(rig, {"mine": [*MINE, 7, 8]})


REPLAY = Replay(
    report="https://github.com/kvcache-ai/Mooncake/issues/4153",
    title="partial hash hits reuse whole blocks",
    mechanism=(
        "with large blocks, a part of a block's hash is looked up, and its existence lets the whole block "
        "be used: the tokens behind that part are another prompt's"
    ),
    rebuilt=(
        "SGLang's own storage prefetch, which takes a page for another of which the first four of sixteen "
        "tokens are the same"
    ),
    rig="sglang_storage",
    perform=perform,
    finds=("head token full", "tail chain full"),
    steps=1,
)

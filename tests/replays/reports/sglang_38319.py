"""Pages of a chunk that the radix tree holds are freed when their request is aborted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tests.engines.sglang.real.rig import Rig
from tests.replays.replay import Replay, Run

LONG = list(range(20, 420))  # several chunks of 128 tokens


def perform(rig: Rig, run: Run) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    tree = rig.scheduler.tree_cache
    free = tree.free_kv_row

    def free_kv_row(kv: Any, ranges: Any) -> None:
        """The chunk's pages too: it is not known that the tree holds them."""
        if kv.cache_protected_len:
            free(kv, [(0, max(stop for _, stop in ranges))])
        else:
            free(kv, ranges)

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request("aborted", LONG, 8)]
        while rig.scheduler.chunked_req is None or not rig.scheduler.chunked_req.kv.cache_protected_len:
            yield ()
        tree.free_kv_row = free_kv_row
        yield [AbortReq(rid="aborted")]
        yield ()
        del tree.free_kv_row
        yield [rig.request("owner", list(range(500, 700)), 8)]
        while "owner" not in rig.finished:
            yield ()

    # An idle scheduler counts its pages and stops; under traffic it does not.
    run.patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "0")
    rig.run(script())
    run.strike()  # a cached prefix holds its next owner's KV
    rig.generate({"hit": [*LONG[:200], 7, 8]})


REPLAY = Replay(
    report="https://github.com/sgl-project/sglang/issues/38319",
    title="chunked prefill inserts pages that an abort frees",
    mechanism=(
        "the radix tree gets the pages of each chunk while the prefill runs; when the request is aborted or "
        "retracted they are freed although the tree holds them, and the next owner overwrites a cached "
        "prefix"
    ),
    rebuilt=(
        "SGLang's own release of an aborted request, with the pages that the tree protects in the range"
    ),
    rig="sglang_storage",
    perform=perform,
    finds=("head token full", "tail chain full"),
    steps=1,
)

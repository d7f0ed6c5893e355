"""Damaged blocks that a real vLLM's prefix cache hands out, and hits that are not compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from canary_kernels import layout
from canary_obs.runtime import first_reads, forward
from canary_obs.vocabulary import State
from tests.engines.vllm.real.forwards import acknowledge, replaced
from tests.engines.vllm.real.rig import Rig, prompts

# What `damaged` reports, apart from the seconds: one block, in the first step that reads it.
FOUND = {
    "clean": [], "blocks": [1], "steps": [1], "reasons": ["kv_data"], "groups": ["full"], "state": "violated",
}  # fmt: skip
NOT_COMPARED, UNREAD = "bytes were not checked: hit comparison, group", "prefix hits were read without"


def compared(rig: Rig) -> dict[str, int]:
    """Slots of hits that were given to the comparison, by group."""
    found = {}
    for group in rig.canary.state.groups:
        row = group.buffers.counters.tolist()
        found[group.name] = (
            row[layout.COUNT_HASHED + layout.Phase.HIT] + row[layout.COUNT_UNHASHED + layout.Phase.HIT]
        )
    return found


def damaged(rig: Rig) -> dict[str, Any]:
    """What the first step says that reads a damaged idle block, and how long after it began."""
    rig.fresh()
    acknowledge(rig)
    (prompt,) = prompts(1, seed=40, shared=100)
    rig.generate([prompt], 2)
    rig.generate([prompt], 2)  # a clean hit
    clean = [repr(row) for row in rig.settle()]
    group = next(own for own in rig.adapter.vllm_groups if own.view.name == "full")
    block = rig.idle_blocks(group.number)[1]
    cache = rig.layer_cache(group.number, 0)
    cache[block] += 1
    started, step = time.monotonic(), rig.canary.step
    rig.start({"hit": prompt}, 2)
    rig.step()
    with rig.adapter.hooks.lock:
        rig.canary.delivery.drain(5.0)
    seconds = time.monotonic() - started
    cache[block] -= 1
    found = [row for row in rig.found if row.phase == "hit"]
    blocks = {row.slot // group.block_size for row in found}
    report = {
        "clean": clean, "seconds": seconds, "blocks": [int(number == block) for number in blocks],
        "steps": sorted({row.step - step for row in found}),
        "reasons": sorted({str(row.reason) for row in found}),
        "groups": sorted({row.group for row in found}), "state": str(rig.canary.verdict()[0]),
    }  # fmt: skip
    rig.finish()
    rig.fresh()
    acknowledge(rig)
    return report


@contextmanager
def copy_not_compared(rig: Rig) -> Iterator[None]:
    """The next step copies a block, as vLLM does when a request starts inside a cached one."""
    scheduler, compare = rig.core.scheduler, forward.compare_slots
    schedule = scheduler.schedule
    pair = rig.idle_blocks()[0], rig.runner.kv_cache_config.num_blocks - 1

    def with_copy(*given: Any) -> Any:
        output = schedule(*given)
        output.kv_cache_block_copies = [pair]
        scheduler.schedule = schedule
        return output

    def without_hits(*given: Any, **named: Any) -> None:
        if given[-1] is not layout.Phase.HIT:
            compare(*given, **named)

    scheduler.schedule = with_copy
    with replaced(forward, "compare_slots", without_hits):
        yield


def ways(rig: Rig) -> dict[str, tuple[Callable[[], Any], str]]:
    """By way: what takes the comparison away while it is entered, and the reason to look for."""
    hits = rig.adapter._block_changes.hits
    report = hits.report

    def half(output: Any, loaded_from: Any, observer: Any) -> None:
        class Halved:
            compares_hits = True

            @staticmethod
            def hit(name: str, slots: Any) -> None:
                observer.hit(name, slots[: slots.shape[0] // 2])

        report(output, loaded_from, Halved())

    nothing = lambda *_: None  # noqa: E731
    return {
        "bytes of prefix hits are not compared": (
            lambda: replaced(first_reads, "compare_slots", nothing), NOT_COMPARED),
        "copied bytes are not compared": (lambda: copy_not_compared(rig), NOT_COMPARED),
        "prefix hits are not shown": (lambda: replaced(hits, "report", nothing), UNREAD),
        "half of a prefix hit is not shown": (lambda: replaced(hits, "report", half), UNREAD),
        "the scheduler does not report its prefix hits": (
            lambda: replaced(hits, "note", lambda output: setattr(hits, "counted", None)),
            "this engine does not count its prefix hits"),
    }  # fmt: skip


def tried(rig: Rig) -> dict[str, dict[str, Any]]:
    """Of every way: the verdict, the reason to look for, and the seconds from the hit to the verdict."""
    rig.fresh()
    shared = prompts(2, seed=41, shared=100)
    rig.generate(shared, 2)
    before = compared(rig)
    rig.generate(shared, 2)
    rig.settle()
    acknowledge(rig)
    assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
    assert all(count > before[name] for name, count in compared(rig).items())
    found = {}
    for way, (entered, names) in ways(rig).items():
        with entered():
            started = time.monotonic()
            rig.generate(shared, 2)
            with rig.adapter.hooks.lock:
                rig.canary.delivery.drain(5.0)
            state, reasons = rig.canary.verdict()
            seconds = time.monotonic() - started
        found[way] = {"state": str(state), "reasons": list(reasons), "seconds": seconds, "names": names}
        rig.generate(shared, 2)
        assert rig.settle() == []
        acknowledge(rig)
        assert rig.canary.verdict() == (State.OK, ()), (way, rig.canary.verdict())
    rig.fresh()
    return found

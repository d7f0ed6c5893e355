"""Ways in which checks of a real SGLang silently do not run, and what the state says of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from canary_obs.engine_api.views import CachedSlots
from canary_obs.engines.sglang import groups
from canary_obs.engines.sglang.device_views import DeviceViews
from canary_obs.engines.sglang.request_chains import RequestChains
from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler, detach_from_scheduler
from canary_obs.engines.sglang.speculation import draft_runners
from canary_obs.runtime import first_reads, forward
from canary_obs.vocabulary import Phase, State
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts
from tests.engines.vllm.real.forwards import NOT_SHOWN, PATIENCE, acknowledge, replaced, without
from tests.engines.vllm.real.hidden import WAYS as HIDDEN
from tests.engines.vllm.real.prefix_hits import NOT_COMPARED as HITS_NOT_COMPARED, UNREAD
from tests.engines.vllm.real.tokens import NOT_CHECKED, NOT_COMPARED
from tests.engines.vllm.real.walks import COUNTS, LEFT_OUT, part_of

Ways = dict[str, tuple[Callable[[], AbstractContextManager[None]], str]]


def nothing(*_: Any, **__: Any) -> None:
    """In place of a check."""


def forwards(rig: Rig) -> Ways:
    """Forwards that the canary does not see, or not to their end."""
    return {
        "hooks never reach the canary": (lambda: _without_hooks(rig), NOT_SHOWN),
        "the forward's hook is not called, the step's is": (
            lambda: without(rig.runner, "forward"), NOT_SHOWN),
        "the step's hook is not called, the forward's is": (
            lambda: without(rig.scheduler, "run_batch"), "the observer failed: step_view"),
        "a forward's last checks are not launched": (
            lambda: replaced(rig.canary.checks, "tail", rig.canary.checks.launch_head), NOT_SHOWN),
    }  # fmt: skip


@contextmanager
def _without_hooks(rig: Rig) -> Iterator[None]:
    with without(rig.scheduler, "run_batch"), without(rig.runner, "forward"):
        yield


def tokens(rig: Rig) -> Ways:
    """Tokens that are not compared with those of the scheduler's requests."""
    build, advance, verify_rows = rig.adapter._views.build, RequestChains.advance, forward.verify_rows

    def without_known(*given: Any, **named: Any) -> Any:
        return replace(build(*given, **named), known_lens=None, known_digests=None)

    def of_long_ago(self: RequestChains, requests: Any, prefixes: Any, ends: Any) -> Any:
        found = advance(self, requests, prefixes, ends)
        return found._replace(known_lens=found.known_lens * 0, known_digests=found.known_digests * 0)

    def head_only(backend: Any, buffers: Any, batch: Any, phase: Phase) -> None:
        if phase is Phase.HEAD:
            verify_rows(backend, buffers, batch, phase)

    found: Ways = {
        "a forward is not given the scheduler's tokens": (
            lambda: replaced(rig.adapter._views, "build", without_known), NOT_CHECKED),
        "the tail does not verify": (lambda: replaced(forward, "verify_rows", head_only), NOT_CHECKED),
    }  # fmt: skip
    if not isinstance(rig.adapter._views, DeviceViews):  # which have the device add each token to the chains
        old = lambda: replaced(RequestChains, "advance", of_long_ago)  # noqa: E731
        found["the scheduler's tokens are those of long ago"] = old, NOT_COMPARED
    return found


def hits(rig: Rig) -> Ways:
    """Prefix hits whose bytes are not compared."""
    found = rig.adapter._hits
    show, admit = found.show, found.admit

    def half(observer: Any) -> None:
        class Halved:
            @staticmethod
            def hit(name: str, slots: Any) -> None:
                observer.hit(name, slots[: slots.shape[0] // 2])

        show(Halved())  # type: ignore[arg-type]

    def others(batch: Any) -> None:
        """As if SGLang numbered the chunks of a prompt in another way."""
        for request in batch.reqs:
            request.extend_batch_idx += 1
        admit(batch)
        for request in batch.reqs:
            request.extend_batch_idx -= 1

    return {
        "bytes of prefix hits are not compared": (
            lambda: replaced(first_reads, "compare_slots", nothing), HITS_NOT_COMPARED),
        "prefix hits are not shown": (
            lambda: replaced(found, "show", lambda _: found._joined.clear()), UNREAD),
        "half of a prefix hit is not shown": (lambda: replaced(found, "show", half), UNREAD),
        "requests with prefix hits are not recognised": (lambda: replaced(found, "admit", others), UNREAD),
    }  # fmt: skip


def walks(rig: Rig) -> Ways:
    """Sweeps that leave out what is cached; each is seen by the next sweep."""
    tree = rig.adapter.prefix_cache
    cached = tree.cached

    def part(keep: slice) -> Callable[..., CachedSlots]:
        return lambda group, unlocked_only: part_of(cached(group, unlocked_only=unlocked_only), keep)

    return {
        "a sweep's walk yields nothing": (lambda: replaced(tree, "cached", part(slice(0))), COUNTS),
        "a sweep's walk yields half of the cache": (
            lambda: replaced(tree, "cached", part(slice(None, None, 2))), COUNTS),
        "a sweep takes cached slots for evicted ones": (
            lambda: replaced(tree, "still_cached", lambda _, slots: torch.zeros_like(slots) > 0), LEFT_OUT),
    }  # fmt: skip


def drafts(rig: Rig) -> Ways:
    """A draft model's KV that is extended, and not shown."""
    (runner,) = draft_runners(rig.scheduler)
    return {"a draft pass is not shown": (lambda: without(runner, "forward"), NOT_SHOWN)}


def hidden(rig: Rig) -> dict[str, dict[str, Any]]:
    """What the adapter does not show of a group's layers: the verdict once the canary has attached anew."""
    view, found = groups._view, dict[str, dict[str, Any]]()

    for way, (hide, names) in HIDDEN.items():

        def hiding(*given: Any, hide: Any = hide, **named: Any) -> Any:
            shown = view(*given, **named)
            return replace(shown, sources=hide(shown.sources))

        detach_from_scheduler(rig.scheduler)
        with replaced(groups, "_view", hiding):
            started = time.monotonic()
            attach_to_scheduler(rig.scheduler, "hidden")
        rig.collect_from()
        seen = {"verdict": rig.canary.verdict(), "seconds": time.monotonic() - started}
        found[way] = seen | {"names": names, "accused": []}
    detach_from_scheduler(rig.scheduler)
    attach_to_scheduler(rig.scheduler, "hidden")
    rig.collect_from()
    assert rig.canary.state.coverage == 1.0
    return found


def tried(rig: Rig, ways: Ways, *, sweeps: bool = False) -> dict[str, dict[str, Any]]:
    """Of every way: the verdict, the seconds until it came, the reason to look for, and who is accused."""
    report = {}
    for number, (way, (entered, names)) in enumerate(ways.items()):
        rig.generate(prompts(4, number), 6)
        acknowledge(rig)
        assert rig.settle() == []
        assert rig.canary.verdict() == (State.OK, ()), (way, rig.canary.verdict())
        with entered():
            started = time.monotonic()
            rig.generate(prompts(4, number), 6)
            if sweeps:
                rig.canary.check_everything()
            while (verdict := rig.canary.verdict())[0] is State.OK:
                assert time.monotonic() - started < PATIENCE, way
                rig.run([()])
            seconds = time.monotonic() - started
        # Slots written meanwhile are read, swept and patrolled.
        rig.generate(prompts(4, number), 6)
        accused = [repr(violation) for violation in rig.settle()]
        report[way] = {"verdict": verdict, "seconds": seconds, "names": names, "accused": accused}
        acknowledge(rig)
    return report

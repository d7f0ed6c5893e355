"""Bytes of prefix hits are compared in the step that reads them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from canary_obs.engines.sglang import adapter
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import VOCABULARY
from tests.engines.vllm.real.prefix_hits import compared

PROMPT = [4 + (7 * place) % (VOCABULARY - 4) for place in range(97)]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else compares the bytes of what is cached."""
    for name, value in (("IDLE_SWEEP", "false"), ("BUSY_SWEEP", "false"), ("PATROL_BUDGET", "off")):
        monkeypatch.setenv(f"KV_CANARY_{name}", value)


def ask(rig: Rig, *names: str) -> None:
    """At once: each with the prompt, and an end of its own."""
    rig.generate({name: [*PROMPT, 4 + ord(name[0])] for name in names}, 3)


@pytest.mark.parametrize("hooks", ["of a CPU", "of GPUs"])
@pytest.mark.parametrize(("model", "page"), [("llama", 1), ("llama", 16), ("latent", 1), ("windows", 16)])
def test_damage_is_found_in_the_step_that_reads_it_first(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, model: str, page: int, hooks: str
) -> None:
    monkeypatch.setattr(adapter, "concurrent", lambda device: hooks == "of GPUs")
    rig = make_rig(model, page_size=page)
    ask(rig, "first")
    assert rig.adapter.prefix_hits() == dict.fromkeys(rig.canary.state.by_name, 0)
    given: dict[str, list[int]] = {}
    hit = rig.canary._announcements.hit

    def noted(name: str, slots: Any, step: int) -> None:
        given[name] = slots.tolist()
        hit(name, slots, step)

    monkeypatch.setattr(rig.canary._announcements, "hit", noted)
    ask(rig, "again")
    # The whole prompt, by pages, and of a window what its next token reads.
    assert len(given["full"]) == len(PROMPT) // page * page
    window = rig.canary.state.by_name[next(reversed(given))].view.window
    assert len(next(reversed(given.values()))) == (len(given["full"]) if window is None else window - 1)
    assert rig.found == []
    assert rig.canary.verdict() == (State.OK, ())
    places = {
        name: locate_byte(rig.canary.state.by_name[name].view.sources[-1], slots[-1], 0)
        for name, slots in given.items()
    }
    step = rig.canary.step + 1
    for place in places.values():
        place.flip(8)
    ask(rig, "damaged")
    for place in places.values():
        place.flip(8)
    rig.canary.check_everything()
    found = [item for item in rig.found if item.phase is Phase.HIT]
    assert {(item.group, item.slot) for item in found} == {(name, given[name][-1]) for name in places}
    assert {(item.reason, item.step) for item in found} == {(Reason.KV_DATA, step)}
    assert compared(rig) == rig.adapter.prefix_hits()


def test_slots_that_several_requests_share_are_read_once(make_rig: Any) -> None:
    rig = make_rig(page_size=16)
    ask(rig, "first")
    ask(rig, "second", "third", "last")
    assert rig.adapter.prefix_hits() == {"full": 3 * 96}
    rig.canary.check_everything()
    assert compared(rig) == {"full": 3 * 96}
    assert rig.counters().hashed[Phase.HIT] == 96
    assert rig.canary.verdict() == (State.OK, ())


def test_chunks_and_requests_that_decode_have_no_hits(make_rig: Any) -> None:
    """A prompt of four chunks, after a hit of its first half, next to one that decodes."""
    rig = make_rig(page_size=1, chunked_prefill_size=32, enable_mixed_chunk=True)
    ask(rig, "first")
    begun = rig.adapter.prefix_hits()["full"]
    long = PROMPT[:48] + [6 + place % 40 for place in range(128)]

    def script() -> Iterator[Iterable[Any]]:
        yield [rig.request("decodes", [9, 8, 7, 6], 40)]
        yield from [()] * 4
        yield from rig.until_done([rig.request("long", long, 3)])

    rig.run(script())
    assert rig.adapter.prefix_hits()["full"] - begun == 48
    assert compared(rig) == {"full": begun + 48}
    assert rig.canary.verdict() == (State.OK, ())


def test_hits_are_not_compared_by_default(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_CANARY_VERIFY_ON_HIT")
    rig = make_rig()
    ask(rig, "first")
    ask(rig, "second")
    assert compared(rig) == {"full": 0}
    assert rig.canary.verdict() == (State.OK, ())

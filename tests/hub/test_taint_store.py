"""Who read damage, over several messages and ranks."""

from __future__ import annotations

import msgspec

from canary_obs.hub.taint_store import DAMAGES_KEPT, TaintStore
from canary_obs.vocabulary import Completeness
from tests.service.fakes import identity, tainted

ME = identity()


def test_a_damage_grows_and_gets_a_new_number() -> None:
    store = TaintStore()
    store.add(tainted(ME, 1, "r1"), "i")
    store.add(tainted(ME, 2), "i")
    ended = msgspec.structs.replace(tainted(ME, 1, "r1").requests[0], running=False, outputs=9)
    message = msgspec.structs.replace(
        tainted(ME, 1, "r2"), completeness=Completeness.UNKNOWN, cause="lost",
        requests=(ended, *tainted(ME, 1, "r2").requests),
    )  # fmt: skip
    store.add(message, "another incident")
    second, first = store.after(0)
    assert (first.number, second.number) == (3, 2)
    assert [(one.request, one.running, one.outputs) for one in first.requests] == [
        ("r1", False, 9), ("r2", True, 3)
    ]  # fmt: skip
    assert (first.incident, first.completeness, first.cause) == ("i", "unknown", "lost")
    assert store.after(2) == [first]
    assert store.of_incident("i") == (second, first)


def test_another_process_counts_its_damages_anew() -> None:
    store = TaintStore()
    store.add(tainted(ME, 1, "r1"), "i")
    restarted = msgspec.structs.replace(ME, started_ns=ME.started_ns + 1)
    assert store.incident_of(tainted(restarted, 1)) is None
    store.add(tainted(restarted, 1, "r2"), "j")
    assert [taint.incident for taint in store.after(0)] == ["i", "j"]


def test_the_damages_that_changed_last_are_kept() -> None:
    store = TaintStore()
    for number in range(DAMAGES_KEPT):
        store.add(tainted(ME, number + 1), "i")
    store.add(tainted(ME, 1, "r1"), "i")
    assert store.forgotten == 0
    store.add(tainted(ME, DAMAGES_KEPT + 1), "i")
    assert store.forgotten == 2
    kept = store.after(0)
    assert len(kept) == DAMAGES_KEPT
    assert kept[-2].requests[0].request == "r1"

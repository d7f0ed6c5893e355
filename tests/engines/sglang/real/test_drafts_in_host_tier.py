"""Speculation beside a host tier: a draft model's KV goes to host memory, and comes back, as the target's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from canary_obs.vocabulary import HOST_PEER, Cause, Phase, Reason, State
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.tiers import (
    PROMPT,
    STORED,
    TIER,
    flip_in_host,
    forget,
    generate,
    install,
    push_out,
    store,
    tier,
)
from tests.engines.sglang.real.traffic import storm


@pytest.fixture(scope="module", autouse=True)
def _host_memory() -> None:
    install()


@pytest.mark.parametrize(
    ("kind", "policy", "page_size"),
    [
        ("eagle", "write_through", 16),
        ("n-grams", "write_back", 1),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                ("eagle tree", "write_through", 1),
                ("eagle3", "write_back", 16),
                ("standalone tree", "write_through", 1),
                ("mtp", "write_back", 1),
            )
        ),
    ],
)
def test_a_storm(
    make_drafting: Any, kind: str, policy: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TIER | {"hicache_write_policy": policy, "page_size": page_size}
    rig = make_drafting(kind, **settings)
    compared = count_received(rig)
    rig.run(storm(rig, count=14))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert not rig.canary.health.faults
    groups = [group.name for group in rig.adapter.groups]
    assert groups == (["full"] if kind == "n-grams" else ["full", "draft"])
    for group in groups:
        assert compared[group] > 20, group
        assert not any(rig.counters(group).unverified.values()), group
    assert tier(rig).without == 0
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    without = make_drafting(kind, **settings)
    without.run(storm(without, count=14))
    assert without.answers == rig.answers


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("eagle", "full"),
        ("eagle", "draft"),
        ("standalone tree", "draft"),
        ("n-grams", "full"),
        ("mtp", "draft"),
    ],
)
def test_a_bit_flips_in_host_memory(make_drafting: Any, kind: str, group: str) -> None:
    """It is seen when the KV comes back, before the first forward reads it."""
    rig = make_drafting(kind, **TIER)
    rig.generate(PROMPT)
    push_out(rig)
    assert rig.settle() == []
    flipped = flip_in_host(rig, group)
    rig.generate({"again": PROMPT["kept"] + [7, 8]})
    found = rig.settle()
    assert {(item.reason, item.group) for item in found} == {(Reason.KV_DATA, group)}
    assert (found[0].phase, found[0].peer) == (Phase.HEAD, HOST_PEER)
    assert 0 < len({item.slot for item in found}) <= flipped


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_drafts_that_a_storage_kept(
    make_drafting: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of stored pages are the target's, and those of drafts that are packed with it (MTP).

    Another draft model's KV gets a baseline when it comes back.
    """
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder := tmp_path / "pages"))
    folder.mkdir()
    rig = make_drafting(kind, **TIER, **STORED)
    # SGLang asks its storage for 256 tokens or more, by pairs of tokens: the last page is another one.
    store(rig, folder, kept := list(range(20, 340)))
    compared = count_received(rig)
    generate(rig, {"again": [*kept, 7, 8]})
    assert rig.settle() == []
    assert compared["full"] >= 256
    assert not any(rig.counters().unverified.values())
    if kind == "eagle":
        assert compared["draft"] == 0
        assert tier(rig).without == compared["full"]
        assert rig.counters("draft").unverified[Cause.BASELINE] > 256
        return
    assert compared["draft"] == compared["full"]
    assert not any(rig.counters("draft").unverified.values())
    forget(rig)
    damaged = sorted(folder.iterdir())[1]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2 - 100] ^= 16  # K's last layer
    damaged.write_bytes(content)
    generate(rig, {"damaged": [*kept, 7, 8]})
    assert {(item.reason, item.group) for item in rig.settle()} == {(Reason.KV_DATA, "draft")}
    assert len({item.slot for item in rig.found}) == 1


def count_received(rig: Rig) -> Counter[str]:
    """Slots that came back with a record, by group, from now on."""
    observer = tier(rig)._observer
    received, counts = observer.received, Counter[str]()

    def counted(name: str, slots: Any, records: Any = None, *more: Any, **named: Any) -> None:
        counts[name] += 0 if records is None else int(slots.numel())
        received(name, slots, records, *more, **named)

    observer.received = counted  # type: ignore[method-assign]
    return counts

"""The detection latency histogram, from the ledger to the page; and what a scrape of many ranks costs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canary_obs.hub.counters import add_totals
from canary_obs.hub.hub import Hub
from canary_obs.injection_counts import LATENCY_BOUNDS, Latencies, PerturbCount
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import PerturbMode
from tests.pace import quiet_seconds
from tests.service.fakes import hello, identity, snapshot

NAME = "kv_canary_detection_latency_seconds"
MODE = PerturbMode.REAL_KV_USED
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
RANKS = 64


def with_latency(counts: dict[int, int], seconds: float) -> dict[PerturbMode, PerturbCount]:
    filled = tuple(counts.get(i, 0) for i in range(len(LATENCY_BOUNDS) + 1))
    return {MODE: PerturbCount(injected=3, detected=3, latency=Latencies(counts=filled, seconds=seconds))}


def test_buckets_are_cumulative_and_end_at_the_count() -> None:
    hub = Hub()
    found = with_latency({0: 2, 6: 1, len(LATENCY_BOUNDS): 4}, 9000.0)
    hub.ingest(snapshot(identity(), 1, perturbations=found), lambda command: None)
    text = Exposition(HubCollector(hub)).page("")[0].decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == NAME]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert len(buckets) == len(LATENCY_BOUNDS) + 1
    assert (buckets["0.01"], buckets["0.5"], buckets["1.0"]) == (2, 2, 3)
    assert (buckets["3600.0"], buckets["+Inf"]) == (3, 7)
    sums = {s.name.removeprefix(NAME): s.value for s in family.samples if not s.name.endswith("_bucket")}
    assert sums == {"_sum": 9000.0, "_count": 7}
    assert {s.labels["mode"] for s in family.samples} == {MODE.value}


def test_earlier_lives_are_added_bucket_by_bucket() -> None:
    before = snapshot(identity(), 1, perturbations=with_latency({1: 5}, 0.5))
    after = snapshot(identity(), 2, perturbations=with_latency({1: 1, 2: 1}, 0.25))
    latency = add_totals(after, before).perturbations[MODE].latency
    assert latency.counts[:3] == (0, 6, 1)
    assert latency.seconds == 0.75


@pytest.fixture
def unpoisoned() -> Iterator[None]:
    """Without `make test`'s MALLOC_PERTURB_, which fills every allocation: that time is none of ours."""
    option, mallopt = -6, getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # glibc's M_PERTURB
    mallopt(option, 0)
    yield
    mallopt(option, int(os.environ.get("MALLOC_PERTURB_", "0")))


@pytest.mark.usefixtures("unpoisoned")
def test_sixty_four_ranks_are_scraped_within_50_ms(capsys) -> None:
    hub = Hub()
    for rank in range(RANKS):
        who = identity(rank)
        hub.ingest(hello(who), lambda command: None)
        hub.ingest(snapshot(who, 3, perturbations=with_latency({1: 5}, 0.5)), lambda command: None)
    exposition = Exposition(HubCollector(hub))
    text = exposition.page("")[0].decode()
    series = sum(line.startswith("kv_canary_") and 'rank="0"' in line for line in text.splitlines())
    seconds = max(
        quiet_seconds(partial(exposition.page, accept), repeats=15) for accept in ("", OPEN_METRICS)
    )
    with capsys.disabled():
        print(f"\nseries per rank and group: {series}; {RANKS} ranks: {1e3 * seconds:.1f} ms")
    assert series < 176
    assert seconds < 0.050

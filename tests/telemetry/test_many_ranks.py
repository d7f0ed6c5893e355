"""/metrics at the limit of ranks, with all of them live and after all of them expired."""

from __future__ import annotations

import pytest

from canary_obs.config import ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.hub.rank_table import RANKS_KEPT
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from tests.pace import quiet_seconds
from tests.service.fakes import hello, identity, snapshot

HOUR = ServiceConfig().rank_kept_seconds


class FullService:
    """A hub with as many live ranks as it keeps, on a clock that only the test advances."""

    def __init__(self):
        self.now = 100.0
        self.hub = Hub(clock=lambda: self.now)
        self.exposition = Exposition(HubCollector(self.hub))
        self.exposition.page("")  # from the second page on it shows how long the one before took
        self.empty = self.series()
        for number in range(RANKS_KEPT):
            self.send(identity(number))

    def send(self, who):
        for message in (hello(who), snapshot(who, 3)):
            self.hub.ingest(message, lambda command: None)

    def series(self):
        lines = self.exposition.page("")[0].splitlines()
        return {line.rpartition(b" ")[0] for line in lines if not line.startswith(b"#")}


@pytest.fixture
def service():
    return FullService()


def test_once_all_ranks_are_dead_the_page_is_that_of_an_empty_service(service):
    full = service.series()
    assert len(full) > 100 * RANKS_KEPT
    service.now += HOUR + 1
    service.hub.tick()
    assert service.series() == service.empty
    cached = sum(map(len, service.exposition._cache.values()))
    assert cached == len(service.empty)
    assert service.hub.counts().expired == RANKS_KEPT
    service.send(identity(RANKS_KEPT))
    added = service.series() - service.empty
    of_ranks = [line for line in added if b"rank=" in line]
    assert all(b'rank="1024"' in line for line in of_ranks)
    assert len(added) < 200


@pytest.mark.slow
def test_a_page_of_all_live_ranks_takes_less_than_a_second(service):
    """0.25 s for 168 000 series of 17 MB, 0.6 s for the first page."""
    page = service.exposition.page("")[0]
    seconds = quiet_seconds(lambda: service.exposition.page(""), repeats=5)
    print(f"\n{RANKS_KEPT} ranks: {len(page) / 1e6:.1f} MB in {seconds:.2f} s")
    assert seconds < 1.0

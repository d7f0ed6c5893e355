"""One station and one service for the whole live test; skipped loudly where Prometheus is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from canary_obs.engines.toolkit.service_process import free_port
from tests.e2e.conftest import House
from tests.ops.station import ALERTMANAGER, PROMETHEUS, Station


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    built = House(tmp_path_factory.mktemp("house"), free_port(), token="ops-token")
    yield built
    built.close()


@pytest.fixture(scope="module")
def station(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    for program in (PROMETHEUS, ALERTMANAGER):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is NOT INSTALLED: apt-get install prometheus prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("station")
    built = Station(folder, free_port(), free_port(), house.port, house.token)
    try:
        built.lay_out()
        built.start()
        yield built
    finally:
        built.close()

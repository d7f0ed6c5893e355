"""Services as child processes, beside one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from canary_obs.demo.service_process import ServiceProcess, free_port
from canary_obs.errors import ConfigurationError


@pytest.fixture
def first(tmp_path: Path) -> Iterator[tuple[ServiceProcess, int]]:
    port = free_port()
    service = ServiceProcess.start(f"ipc://{tmp_path}/first", port)
    yield service, port
    service.stop()


def test_two_with_ports_of_their_own(first: tuple[ServiceProcess, int], tmp_path: Path) -> None:
    second = ServiceProcess.start(f"ipc://{tmp_path}/second", free_port())
    second.stop()
    assert second.url != first[0].url


def test_a_port_that_another_one_has_is_refused(first: tuple[ServiceProcess, int], tmp_path: Path) -> None:
    """The other one answers: that is no sign of life of the new one."""
    with pytest.raises(ConfigurationError, match="a service answers there already"):
        ServiceProcess.start(f"ipc://{tmp_path}/second", first[1])


def test_a_service_that_refuses_to_start_is_an_error(
    first: tuple[ServiceProcess, int], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="ended with exit code"):
        ServiceProcess.start(f"ipc://{tmp_path}/first", free_port())

"""Every fault of a transfer is seen before the first forward that would use it, and changes the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault_cases.transfers import TRANSFERS, TransferFault
from tests.reference_engine.disaggregated import alone, serve
from tests.reference_engine.two_engines import Ranks, ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(1, 1, tmp_path_factory.mktemp("pair")) as started:
        yield started


@pytest.mark.parametrize("fault", TRANSFERS, ids=lambda fault: fault.sender)
def test_transfer_fault(pair: Ranks, fault: TransferFault) -> None:
    prefill, decode = pair.run(serve, sender=fault.sender, model=fault.model, shortest=fault.shortest)
    assert prefill.violations == []
    (first,) = decode.first_steps.values()
    seen = {f"{v.phase} {v.reason}" for v in decode.violations if v.step <= first and v.phase == "head"}
    assert tuple(sorted(seen)) == fault.finds
    assert (decode.outputs == alone(1, fault.model, fault.shortest)) is bool(fault.harmless)

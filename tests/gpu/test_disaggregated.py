"""KV and records from GPU to GPU through NCCL: the code that gloo runs on the CPU."""

from __future__ import annotations

import pytest
import torch

from canary_obs.vocabulary import Phase, Reason
from tests.reference_engine.disaggregated import serve
from tests.reference_engine.two_engines import ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICES = {"device": ("cuda:0", "cuda:1"), "dtype": torch.float32}


def test_clean_and_damaged_transfers_between_two_gpus(tmp_path) -> None:
    with ranks(1, 1, tmp_path) as pair:
        prefill, decode = pair.run(serve, count=9, engine=DEVICES)
        _, damaged = pair.run(serve, sender="DamagedAtSource", engine=DEVICES)
        _, truncated = pair.run(serve, sender="Truncated", engine=DEVICES)
    assert prefill.violations == decode.violations == []
    full = decode.final.groups["full"]
    assert full.hashed[Phase.HEAD] > 100
    assert sum(full.unverified.values()) == 0
    assert len(decode.outputs) == 9
    for report, slots in ((damaged, 1), (truncated, 4)):
        head = [v for v in report.violations if v.phase is Phase.HEAD]
        assert {v.reason for v in head} == {Reason.KV_DATA}
        assert len({v.slot for v in head}) == slots
        assert max(v.step for v in head) <= min(report.first_steps.values())

"""What the table says of each verdict."""

from __future__ import annotations

import pytest

from canary_obs.fleet.report import GpuRow, fleet_report
from canary_obs.fleet.verdict import assess
from canary_obs.vocabulary import HOST_PEER, UNKNOWN_PEER
from tests.fleet.cases import bad_link, one_bad_sender
from tests.fleet.histories import History


def rows(history: History) -> dict[str, GpuRow]:
    evidence = history.evidence()
    return {row.gpu_uuid: row for row in fleet_report(evidence, assess(evidence), {}).gpus}


def test_a_link_is_named_by_its_peer() -> None:
    (row,) = rows(bad_link()).values()
    assert row.verdict == "link"
    assert "nearly all in blocks that arrived damaged from the peer prefill-3" in row.reasons
    assert row.next_step == "look at the NIC, the cable and the peer before the GPU"


def test_a_peer_that_damages_what_several_get_is_the_one_to_look_at() -> None:
    found = rows(one_bad_sender())
    assert "2 GPUs get damaged blocks from this peer" in found["GPU-0009"].reasons
    assert found["GPU-0030"].next_step.startswith("look at prefill-3 first")
    assert found["GPU-0020"].verdict == "suspect_gpu"


@pytest.mark.parametrize(
    ("peer", "said", "next_step"),
    [
        (UNKNOWN_PEER, "peers that the engine does not name", "look at the NIC"),
        (HOST_PEER, "came back damaged from the host's memory", "look at the host's memory"),
    ],
)
def test_what_is_no_name_is_not_said_as_one(peer: str, said: str, next_step: str) -> None:
    history = one_bad_sender()
    for gpu in history.gpus[:31]:
        gpu.peers = (peer,) * len(gpu.peers)
    row = rows(history)["GPU-0009"]
    assert any(said in reason for reason in row.reasons)
    assert not any("GPUs get damaged" in reason for reason in row.reasons)
    assert row.next_step.startswith(next_step)

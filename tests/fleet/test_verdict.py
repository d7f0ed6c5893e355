"""The code's verdicts on fleets with one thing wrong; test_rules.py compares the rules with it."""

from __future__ import annotations

import pytest

from canary_obs.fleet.verdict import Verdict, assess
from canary_obs.vocabulary import OTHER_PEERS
from tests.fleet.cases import CASES, bad_link, fleet, one_bad_gpu
from tests.fleet.histories import RELEASE, History


@pytest.mark.parametrize("case", CASES)
def test_the_code_judges_each_case(case: str) -> None:
    history, verdicts, releases = CASES[case]
    found = assess(history.evidence())
    assert {gpu.gpu_uuid: gpu.verdict for gpu in found.gpus} == verdicts
    assert tuple(suspect.release for suspect in found.releases) == releases


def test_one_bad_part_does_not_hide_another() -> None:
    gpus = fleet(64)
    gpus[3].findings = tuple(range(6, 6 * 160, 6))
    gpus[40].findings = (100, 300, 500, 700)
    found = assess(History(gpus=gpus).evidence())
    assert {gpu.gpu_uuid for gpu in found.gpus if gpu.verdict is Verdict.SUSPECT_GPU} == {
        "GPU-0003", "GPU-0040",
    }  # fmt: skip


def test_what_the_driver_says_raises_the_score() -> None:
    (plain,) = assess(one_bad_gpu().evidence()).gpus
    (with_xid,) = assess(one_bad_gpu(xid=94).evidence()).gpus
    (with_both,) = assess(one_bad_gpu(xid=48, remaps=True).evidence()).gpus
    assert with_xid.score == pytest.approx(plain.score + 2)
    assert with_both.score == pytest.approx(plain.score + 3)
    assert RELEASE in plain.releases


def test_peers_that_are_not_told_apart_are_no_link() -> None:
    history = bad_link()
    history.gpus[9].peers = (OTHER_PEERS,) * 4
    (gpu,) = assess(history.evidence()).gpus
    assert (gpu.verdict, gpu.peer) == (Verdict.SUSPECT_GPU, "")

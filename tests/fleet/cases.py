"""Fleets with one thing wrong, and what must be found."""

from __future__ import annotations

from typing import Any

from canary_obs.fleet.evidence import Release
from canary_obs.fleet.verdict import Verdict
from tests.fleet.histories import Gpu, History


def fleet(number: int, **others: Any) -> list[Gpu]:
    return [Gpu(uuid=f"GPU-{i:04d}", node=f"n{i // 8}", **others) for i in range(number)]


def one_bad_gpu(among: int = 32, **changes: Any) -> History:
    gpus = fleet(among)
    gpus[17] = Gpu(uuid="GPU-0017", node="n2", findings=(100, 300, 500), **changes)
    return History(gpus=gpus)


def bad_release() -> History:
    old, new = fleet(32), fleet(32, release=Release("vllm", "1.1", "llama@1"))
    for i, gpu in enumerate(new):
        gpu.uuid, gpu.findings = f"GPU-1{i:03d}", (40 * i + 7, 40 * i + 99) if i < 20 else ()
    return History(gpus=old + new)


def bad_link() -> History:
    gpus = fleet(32)
    gpus[9] = Gpu(uuid="GPU-0009", findings=(100, 300, 500, 700), peers=("prefill-3",) * 4)
    return History(gpus=gpus)


def one_bad_sender() -> History:
    """Two GPUs get damaged blocks from one peer; a third damages itself what it gets from any."""
    gpus = fleet(32)
    for number in (9, 30):
        gpus[number].findings, gpus[number].peers = (100, 300, 500, 700), ("prefill-3",) * 4
    gpus[20].findings, gpus[20].peers = (90, 290, 490, 690), ("prefill-3", "prefill-1", "prefill-2", "other")
    return History(gpus=gpus)


def too_little() -> History:
    gpus = fleet(32)
    gpus[5] = Gpu(uuid="GPU-0005", findings=(100, 300))
    return History(gpus=gpus)


def reset_without_findings() -> History:
    """The engine of a GPU with two findings restarts, and so do those of all others."""
    gpus = fleet(32, resets=(500, 700))
    gpus[5].findings = (100, 300)
    return History(gpus=gpus)


def everywhere_a_new_driver() -> History:
    """The whole fleet is upgraded while one GPU goes on failing."""
    gpus = fleet(32, changes=400, new_driver="590.10")
    gpus[17].findings = (100, 300, 500)
    return History(gpus=gpus)


def one_burst() -> History:
    """Findings in three periods, of two bursts: one of them goes on past the end of its period."""
    gpus = fleet(32)
    gpus[5].findings = (34, 40, 400)
    return History(gpus=gpus)


def all_the_time() -> History:
    """A part that fails in every hour has findings that go on and on."""
    gpus = fleet(32)
    gpus[5].findings = tuple(range(600, 840, 6))
    return History(gpus=gpus)


def few_peers() -> History:
    """Three GPUs are no fleet: the peers' own rate is unknown."""
    gpus = fleet(3)
    gpus[1].findings = (100, 300, 500)
    return History(gpus=gpus)


CASES = {
    "one bad GPU among 64": (one_bad_gpu(64), {"GPU-0017": Verdict.SUSPECT_GPU}, ()),
    "a burst is one finding": (one_bad_gpu(per_finding=5000), {"GPU-0017": Verdict.SUSPECT_GPU}, ()),
    "one bad link": (bad_link(), {"GPU-0009": Verdict.LINK}, ()),
    "one bad sender": (
        one_bad_sender(),
        {"GPU-0009": Verdict.LINK, "GPU-0030": Verdict.LINK, "GPU-0020": Verdict.SUSPECT_GPU},
        (),
    ),
    "too little evidence": (too_little(), {"GPU-0005": Verdict.NOT_ENOUGH_EVIDENCE}, ()),
    "a burst across periods": (one_burst(), {"GPU-0005": Verdict.NOT_ENOUGH_EVIDENCE}, ()),
    "fails in every hour": (all_the_time(), {"GPU-0005": Verdict.SUSPECT_GPU}, ()),
    "too few peers": (few_peers(), {"GPU-0001": Verdict.NOT_ENOUGH_EVIDENCE}, ()),
    "counter resets": (one_bad_gpu(resets=(150, 501, 800)), {"GPU-0017": Verdict.SUSPECT_GPU}, ()),
    "counter resets of a GPU that is fine": (
        reset_without_findings(),
        {"GPU-0005": Verdict.NOT_ENOUGH_EVIDENCE},
        (),
    ),
    "moved to another node": (
        one_bad_gpu(changes=400, new_node="n-new"),
        {"GPU-0017": Verdict.SUSPECT_GPU},
        (),
    ),
    "a new driver": (one_bad_gpu(changes=400, new_driver="590.10"), {"GPU-0017": Verdict.SUSPECT_GPU}, ()),
    "all peers have a new driver": (
        everywhere_a_new_driver(),
        {"GPU-0017": Verdict.SUSPECT_GPU},
        (),
    ),
    "one bad release": (
        bad_release(),
        {f"GPU-1{i:03d}": Verdict.SOFTWARE for i in range(20)},
        (Release("vllm", "1.1", "llama@1"),),
    ),
}

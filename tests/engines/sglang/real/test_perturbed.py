"""All modes of fault injection in a real SGLang, in each kind of group: nothing is missed or unexplained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler
from canary_obs.vocabulary import PerturbMode
from tests.engines.perturbed import PERTURB, SETTINGS, Lines, check, tally
from tests.engines.sglang.real import unified_memory
from tests.engines.sglang.real.index_keys import PAGE, add_index_keys
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts

_PATIENCE = 10.0  # seconds


@pytest.mark.parametrize(
    ("model", "group"),
    [("llama", "full"), ("windows", "swa"), ("latent", "full"), ("latent", "indexer"), ("unified", "swa")],
)
def test_every_injection_is_accounted_for(
    make_rig: Any, model: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SETTINGS | {f"{PERTURB}_GROUP": group}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KV_CANARY_IDLE_SWEEP_SECONDS", "0.01")
    more: dict[str, Any] = {}
    if group == "indexer":
        add_index_keys(monkeypatch.setattr)
        more["page_size"] = PAGE
    if model == "unified":
        unified_memory.install(monkeypatch)
        more, model = dict(unified_memory.SETTINGS), "windows"
    rig = make_rig(model, disable_overlap_schedule=model != "windows", **more)
    check({mode.value: _mode(rig, mode.value, monkeypatch) for mode in PerturbMode})


def _mode(rig: Rig, mode: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    def busy() -> None:
        for seed in range(2):
            rig.generate({f"{mode}.{name}": prompt for name, prompt in prompts(6, seed).items()}, 12)

    def idle(injections: Any) -> None:
        deadline = time.monotonic() + _PATIENCE

        def script() -> Iterator[Iterable[Any]]:
            while injections.open and time.monotonic() < deadline:
                yield ()  # exchanged tokens stay open: the next forward, or the last check, closes them

        rig.run(script())

    monkeypatch.setenv(PERTURB, f"{mode}=0.5")
    rig.run([[FlushCacheReqInput()], (), ()])
    with Lines() as log:
        attach_to_scheduler(rig.scheduler, "perturbed")
        rig.collect_from()
        rig.found.clear()
        return tally(rig, mode, log, busy, idle)

"""The demo of the reference engine: what it reports while it runs, and its summary."""

from __future__ import annotations

from canary_obs.config import IN_PROCESS
from canary_obs.demo.plan import DemoPlan
from canary_obs.demo.reference import run_demo

SETTINGS = {"endpoint": IN_PROCESS, "sweep_interval": 20}


def test_a_clean_run() -> None:
    notes: list[str] = []
    summary = run_demo(DemoPlan(shape="tiny", device="cpu", steps=60, settings=SETTINGS), notes.append)
    assert summary["steps"] == 60
    assert (summary["violations"], summary["state"], summary["slots_unverified"]) == (0, "ok", 0)
    assert summary["sweep_passes"] > 0
    assert summary["injections"] is None
    (attached,) = notes
    assert attached.startswith("canary attached: 256 slots")


def test_injections_are_summarised() -> None:
    settings = SETTINGS | {"perturb": "real_kv_used=0.2", "perturb_enabled": True}
    summary = run_demo(DemoPlan(shape="tiny", device="cpu", steps=60, settings=settings), lambda _: None)
    tally = summary["injections"]["real_kv_used"]
    assert tally["injected"] == tally["detected"] + tally["masked"] > 0
    assert (summary["state"], summary["violations_by_reason"].keys()) == ("violated", {"kv_data"})


def test_without_a_canary() -> None:
    settings = SETTINGS | {"mode": "none"}
    summary = run_demo(DemoPlan(shape="tiny", device="cpu", steps=5, settings=settings), lambda _: None)
    assert (summary["state"], summary["slots_verified"]) == ("off", 0)

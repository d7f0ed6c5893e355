"""Sliding-window groups end to end: protected, reported and swept separately from full groups."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from canary_obs.errors import ConfigurationError
from canary_obs.records import StartSweep
from canary_obs.runtime.report.swa_divergence import LOG_KEY
from canary_obs.vocabulary import PerturbMode, Phase, Reason, State, SweepStatus, Trigger
from tests.reference_engine.workloads import account
from tests.runtime.conftest import MakeRig, Rig
from tests.sizes import sized

# Names of SGLang's line, and ours for the same.
_SGLANG_NAMES = {
    "forward_ct": "step",
    "verify_full": "verified_full",
    "verify_swa": "verified_swa",
    "swa_full_idx_divergence": "index_divergence",
    "swa_out_of_window_tokens": "out_of_window",
}
SWAP = PerturbMode.NEXT_TOKEN_SWAP
# Modes of perturbation that share a run. A swap is seen in all groups: it would hide what others do there.
RUNS = sized(
    {mode.value: [mode] for mode in PerturbMode},
    {SWAP.value: [SWAP], "others": [mode for mode in PerturbMode if mode is not SWAP]},
)


def windows_of(rig: Rig):
    windows = rig.engine.scheduler.windows
    assert windows is not None
    return windows


def test_the_three_signals(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig(model="swa", swa_divergence_interval=100, sweep_interval=50)
    rig.run(450)
    final = rig.canary.detach()
    lines = [line for line in caplog.messages if line.startswith(LOG_KEY)]
    reports = [json.loads(line.removeprefix(f"{LOG_KEY}=")) for line in lines]
    assert [report["step"] for report in reports] == [100, 200, 300, 400, 450]
    for report in reports:
        assert report["out_of_window"] >= 1
        assert report["index_divergence"] >= 1
        assert 0 < report["verified_swa"] < report["verified_full"]
        assert {theirs: report[theirs] for theirs in _SGLANG_NAMES} == {
            theirs: report[ours] for theirs, ours in _SGLANG_NAMES.items()
        }
    assert final.swa_divergence is not None
    assert json.loads(lines[-1].removeprefix(f"{LOG_KEY}="))["step"] == final.swa_divergence.step
    # The counters of the last report are those of the snapshot: head and tail of each group.
    for name in ("full", "swa"):
        verified = final.groups[name].verified
        assert verified[Phase.HEAD] + verified[Phase.TAIL] == reports[-1][f"verified_{name}"]


def test_the_reported_tokens_are_those_of_the_device(make_rig: MakeRig) -> None:
    rig = make_rig(model="swa", swa_divergence_interval=1)
    rig.run(120)
    found = rig.canary.swa.latest
    pool = rig.engine.runner.pool.window
    assert found is not None
    assert pool is not None
    live = torch.from_numpy(rig.engine.scheduler.live_slots())
    windows = windows_of(rig)
    full, swa = windows.slots.changes()
    pool.full_to_swa[torch.from_numpy(full)] = torch.from_numpy(swa)
    mapped = pool.full_to_swa[live]
    assert found.out_of_window == int((mapped < 0).sum()) > 0
    assert found.index_divergence == int(((mapped >= 0) & (mapped != live)).sum()) > 0


@pytest.mark.parametrize("interval", [1, 1000])
def test_nothing_is_reported_too_early(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, interval: int
) -> None:
    """Zeros of an engine without forwards, or without counters, would read as an unprotected group."""
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig(model="swa", swa_divergence_interval=interval)
    for _ in range(3):
        rig.engine.idle()
    rig.canary.swa.report(1, None)
    assert rig.canary.swa.latest is None
    assert rig.canary.swa.due_step == interval
    assert rig.canary.detach().swa_divergence is None
    assert LOG_KEY not in caplog.text


def test_an_interval_of_0_reports_at_detach_only(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig(model="swa", swa_divergence_interval=0)
    rig.run(60)
    assert rig.canary.swa.latest is None
    final = rig.canary.detach().swa_divergence
    assert final is not None
    assert (final.step, caplog.text.count(LOG_KEY)) == (60, 1)


def test_nothing_is_reported_without_a_window(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig(swa_divergence_interval=10)
    rig.run(30)
    assert rig.canary.detach().swa_divergence is None
    assert LOG_KEY not in caplog.text


@pytest.mark.parametrize("page_size", sized([1, 16], [16]))
def test_a_long_clean_run(make_rig: MakeRig, page_size: int) -> None:
    rig = make_rig(model="swa", sweep_interval=20, patrol_budget="20%", engine={"page_size": page_size})
    rig.run(700)
    account(rig.engine)
    rig.canary.check_everything()
    assert rig.canary.verdict() == (State.OK, ())
    statistics = rig.engine.statistics
    assert min(statistics.preemptions, statistics.evictions, statistics.aborts, windows_of(rig).evicted) > 0
    final = rig.canary.detach()
    assert not any(sum(group.unverified.values()) for group in final.groups.values())
    assert rig.canary.sweeper.last.status is SweepStatus.PASSED


@pytest.mark.parametrize("group", ["full", "swa"])
@pytest.mark.parametrize("modes", RUNS.values(), ids=RUNS)
def test_injections_into_one_group_leave_the_other_alone(
    make_rig: MakeRig, modes: list[PerturbMode], group: str
) -> None:
    rig = make_rig(
        model="swa", perturb=",".join(f"{mode}=0.2" for mode in modes), perturb_enabled=True,
        perturb_seed=7, perturb_group=group, patrol_budget="50%", sweep_interval=40, engine={"page_size": 16},
    )  # fmt: skip
    rig.run(sized(300, 100))
    rig.canary.check_everything()
    assert rig.canary.injector is not None
    for mode in modes:
        tally = rig.canary.injector.injections.counts()[mode]
        assert tally.injected > sized(15, 4), mode
        assert tally.detected + tally.masked == tally.injected, mode
        assert tally.detected > 0.8 * tally.injected, mode
    other = rig.canary.detach().groups["full" if group == "swa" else "swa"]
    found = {reason for reasons in other.violations.values() for reason, count in reasons.items() if count}
    tokens = {Reason.WRITE_TOKEN, Reason.TOKEN, Reason.CHAIN}  # which all groups have in common
    assert found <= (tokens if SWAP in modes else set())


def swept(rig: Rig) -> None:
    """Everything a running sweep still has to do."""
    canary = rig.canary
    while canary.sweeper.running:
        canary.sweeper.advance(10.0, canary.counter_reader.next_sequence)
        canary.delivery.drain(10.0)


def test_slots_that_left_the_window_during_a_sweep_are_evicted_not_failed(make_rig: MakeRig) -> None:
    rig = make_rig(model="swa", patrol_budget="off")
    rig.run(200)
    rig.finish_requests()
    held = rig.canary.state.by_name["swa"].view.num_slots - windows_of(rig).slots.free_slots
    rig.canary.sweeper.request(StartSweep(id="one", groups=("swa",)), rig.canary.step)
    windows, cache = windows_of(rig), rig.engine.scheduler.cache
    node = max(cache.oldest_first(), key=lambda node: int(windows.slots.resident(node.slots).sum()))
    # Every other slot goes, and other tokens move in: the slots left lose the one before them.
    gone = node.slots[windows.slots.resident(node.slots)][::2]
    taken = windows.slots.of[gone]
    windows.slots.drop(gone)
    others = torch.from_numpy(taken)
    rig.canary.state.by_name["swa"].forget(others)
    rig.canary.state.by_name["swa"].adopt(others[:1])
    donor = next(n for n in cache.oldest_first() if n is not node and n.slots.size)
    records = rig.canary.state.by_name["full"].records_of(torch.from_numpy(donor.slots[:1]))
    rig.canary.state.by_name["swa"].store(others[1:], records.expand(len(others) - 1, -1).clone())
    swept(rig)
    done = rig.canary.sweeper.last
    assert done is not None
    assert (done.status, done.violations) == (SweepStatus.PASSED, 0)
    assert done.total == held
    assert sum(done.skipped.values()) == len(taken) > 4
    assert done.checked == held - len(taken)


def test_a_sweep_walks_resident_slots_only(make_rig: MakeRig) -> None:
    rig = make_rig(model="swa", patrol_budget="off")
    cache = rig.canary._adapter.prefix_cache
    gaps = locked = 0
    for _ in range(200):
        rig.run(1)
        held = cache.cached("swa", unlocked_only=False)
        assert bool((held.slots >= 0).all())
        gaps += int(((held.previous == -1) & (held.positions > 0)).sum())
        locked += held.slots.numel() - cache.cached("swa", unlocked_only=True).slots.numel()
    assert gaps > 0
    assert locked > 0


def test_a_sweep_of_tokens_that_the_window_group_holds(make_rig: MakeRig) -> None:
    rig = make_rig(model="swa", patrol_budget="off", swa_resident_only=True)
    rig.run(200)
    rig.finish_requests()
    windows, cache = windows_of(rig), rig.engine.scheduler.cache
    resident = int(windows.slots.resident(cache.held()).sum())
    assert 0 < resident < cache.held().size
    totals = []
    for number, flag in enumerate((False, True)):
        command = StartSweep(id=str(number), groups=("full",), swa_resident_only=flag)
        rig.canary.sweeper.request(command, rig.canary.step)
        swept(rig)
        done = rig.canary.sweeper.last
        assert done is not None
        assert (done.status, done.checked) == (SweepStatus.PASSED, done.total)
        totals.append(done.total)
    assert totals == [cache.held().size, resident]
    rig.canary.check_everything()
    done = rig.canary.sweeper.last
    assert done is not None
    assert (done.trigger, done.total) == (Trigger.IDLE, 2 * resident)


def test_without_windows_that_sweep_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigurationError, match="does not show which tokens a sliding-window group holds"):
        make_rig(swa_resident_only=True)
    rig = make_rig()
    rig.canary.sweeper.request(StartSweep(id="one", swa_resident_only=True), 0)
    done = rig.canary.sweeper.last
    assert done is not None
    assert done.status is SweepStatus.FAILED
    assert done.error is not None
    assert "leave it out" in done.error
    rig.run(5)
    assert not rig.canary.health.faults


def test_a_wrong_translation_is_detected_at_the_next_step(make_rig: MakeRig) -> None:
    rig = make_rig(model="swa", patrol_budget="off")
    rig.run(100)
    pool, windows = rig.engine.runner.pool.window, windows_of(rig)
    assert pool is not None
    while not (busy := [r for r in rig.engine.scheduler.running if r.computed > r.window_start + 4]):
        rig.run(1)
    request = busy[0]
    full = int(request.slots[request.computed - 3])
    pool.full_to_swa[full] = (pool.full_to_swa[full] + 1) % pool.num_slots
    step = rig.canary.step
    rig.engine.step()
    rig.canary.delivery.drain(5.0)
    final = rig.canary.detach()
    assert final.step == step + 1
    assert sum(sum(reasons.values()) for reasons in final.groups["swa"].violations.values()) > 0
    assert sum(sum(reasons.values()) for reasons in final.groups["full"].violations.values()) == 0
    assert windows.slots.of[full] != int(pool.full_to_swa[full])

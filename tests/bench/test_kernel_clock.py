"""Host time without kernels, on the reference engine."""

from __future__ import annotations

import importlib

import pytest

from canary_obs import CanaryConfig, install_canary
from canary_obs.bench.kernel_clock import KernelClock, without_kernels
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.settings import tiny
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic


def test_kernels_are_taken_from_the_hook_that_calls_them() -> None:
    verify = importlib.import_module("canary_kernels.verify.cpu")
    original = verify.verify_rows
    engine, traffic = Engine(tiny()), Traffic(scaled_traffic(max_context=128, max_running=8), seed=1)
    canary = install_canary(engine, CanaryConfig(endpoint="inproc", backend="numba", idle_sweep=False))
    canary.mark_ready()
    clock = KernelClock(canary)
    for _ in range(20):
        traffic.advance(engine)
        engine.step()
    whole, host = dict(canary.overhead), clock.read()
    clock.close()
    assert verify.verify_rows is original
    assert host.pop("kernels") == pytest.approx(sum(whole.values()) - sum(host.values()))
    for hook in ("head", "tail", "patrol"):
        assert 0.0 < host[hook] < whole[hook]
    assert host["adapter"] == whole["adapter"]  # on this engine it launches none
    engine.step()
    assert clock.read()["kernels"] == pytest.approx(sum(whole.values()) - sum(host.values()))
    canary.detach()


def test_all_hooks_together_leave_the_kernels_out() -> None:
    columns = {"head": [5.0, 7.0], "kernels": [2.0, 30.0], "all": [7.0, 37.0]}
    assert without_kernels(columns) == columns | {"all": [5.0, 7.0]}
    assert without_kernels({"head": [5.0], "all": [5.0]}) == {"head": [5.0], "all": [5.0]}

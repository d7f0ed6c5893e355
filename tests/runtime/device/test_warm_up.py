"""What the canary compiles as it is attached is no surprise to an engine that monitors compilations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from canary_obs.engines.reference.adapter import ReferenceAdapter
from canary_obs.runtime import canary
from canary_obs.runtime.device import bandwidth, warm_up
from canary_obs.runtime.device.warm_up import expected_compilation

knobs = pytest.importorskip("triton").knobs


def refuse(**_: object) -> None:
    raise RuntimeError("compiled during inference")


def test_the_hook_is_absent_within_and_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", refuse)
    with expected_compilation():
        assert knobs.runtime.jit_post_compile_hook is None
    assert knobs.runtime.jit_post_compile_hook is refuse
    with pytest.raises(KeyError), expected_compilation():
        raise KeyError
    assert knobs.runtime.jit_post_compile_hook is refuse


def test_attaching_asks_no_hook(make_rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = []

    def noting(original: Callable[..., object]) -> Callable[..., object]:
        def noted(*given: object) -> object:
            hooks.append(knobs.runtime.jit_post_compile_hook)
            return original(*given)

        return noted

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", refuse)
    monkeypatch.setattr(canary, "measure_bandwidth", noting(canary.measure_bandwidth))
    monkeypatch.setattr(bandwidth, "_CPU_SLOTS", 1)  # interpreted, each takes 15 ms
    monkeypatch.setattr(warm_up, "verify_rows", noting(warm_up.verify_rows))
    monkeypatch.setattr(warm_up, "_BATCHES", ((1, 1),))
    monkeypatch.setattr(ReferenceAdapter, "attach", noting(ReferenceAdapter.attach))
    make_rig(backend="triton", idle_sweep=False, patrol_budget="off")
    assert len(hooks) > 2
    assert set(hooks) == {None}

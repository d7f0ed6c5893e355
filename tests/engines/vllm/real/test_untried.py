"""A vLLM that is newer than the versions tested: attached, rehearsed, and called degraded; or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from canary_obs.engines.vllm import plugin, rehearsal, worker
from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import prompts

NEWER = "vLLM 0.99.0 is newer than the versions that were tested"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real vLLM under a version that nobody has tested."""
    plugin.unregister()
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.99.0")
        yield
    plugin.unregister()
    plugin.register()


@pytest.mark.usefixtures("newer")
def test_a_newer_version_is_rehearsed_and_protected(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    rig = make_rig()
    state, reasons = rig.canary.verdict()
    assert (state, len(reasons)) == (State.DEGRADED, 1)
    assert reasons[0].startswith(NEWER)
    assert reasons[0].endswith("a rehearsal agreed")
    answers = rig.generate(prompts(4), 8)
    assert rig.settle() == []
    damaged = rig.layer_cache(0, 1)[rig.idle_blocks()[-1]]
    kept = damaged.clone()
    with rig.at_rest():
        damaged.zero_()
        assert rig.settle()
        damaged.copy_(kept)
    rig.found.clear()

    rig.llm.sleep(level=1)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "rehearse", None)  # an engine that wakes up is not rehearsed again
        rig.llm.wake_up()
    rig.collect_from()
    assert rig.generate(prompts(4), 8) == answers
    assert rig.settle() == []
    assert rig.canary.verdict()[1][0].endswith("a rehearsal agreed")


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("where", ["hooks", "placement", "reads"])
def test_seams_that_do_not_answer_are_refused(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    named = {
        "hooks": "the state is blind",
        "placement": "is written elsewhere than probe writes",
        "reads": "the state is violated",
    }[where]
    if where == "hooks":  # this version computes its forwards elsewhere
        monkeypatch.setattr("canary_obs.engines.vllm.step_hooks.StepHooks.begin_forward", lambda *_: None)
    elif where == "placement":  # the probe writes went where forwards do not write
        shifted = rehearsal.read_slot
        monkeypatch.setattr(rehearsal, "read_slot", lambda source, slot: shifted(source, slot + 1))
    else:  # something writes where the canary does not expect it
        step = rehearsal._run

        def run(of: Any, output: Any) -> None:
            step(of, output)
            cache = next(iter(of.model_runner.compilation_config.static_forward_context.values())).kv_cache
            cache[1].zero_()

        monkeypatch.setattr(rehearsal, "_run", run)
    rig = make_rig()
    assert worker.runtime_of(rig.worker) is None
    assert "was rehearsed" in caplog.text
    assert named in caplog.text
    assert len(rig.generate(prompts(2), 4)) == 2


@pytest.mark.usefixtures("newer")
def test_what_cannot_be_rehearsed_says_so_and_strictness_refuses(make_rig: Any, caplog: Any) -> None:
    plugin.register()
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    rig = make_rig(speculative_config=speculation, async_scheduling=False)
    assert rig.canary.verdict()[1][0].endswith("not rehearsed: drafting takes part in each step")
    worker.detach_from_worker(rig.worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_CANARY_UNTRIED_ENGINE", "refuse")
        worker.attach_to_worker(rig.worker)
    assert worker.runtime_of(rig.worker) is None
    assert "KV_CANARY_UNTRIED_ENGINE=refuse" in caplog.text

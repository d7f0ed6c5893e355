"""Sound engines: nothing is reported, everything is checked, and the answers stay what they were."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from canary_obs.engines.sglang import adapter
from canary_obs.engines.sglang.stream_hooks import StreamHooks
from canary_obs.engines.toolkit.forward_stream import ForwardStream
from canary_obs.vocabulary import Phase, State
from tests.engines.sglang.real.traffic import prompts, storm

# Memory for about two of a storm's longest requests.
_SMALL = {"max_total_tokens": 832, "enable_mixed_chunk": True}
_LOOPS = ((True, "normal"), (False, "overlap"))
_WHERE = [
    pytest.param(model, {"page_size": page, "disable_overlap_schedule": plain}, id=f"{model}-{page}-{loop}")
    for model, pages in (("llama", (1, 16)), ("latent", (1,)), ("windows", (1, 16)))
    for page in pages
    for plain, loop in _LOOPS
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Forward modes, retractions and trimmed windows, by SGLang's own classes."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    found = Counter[str]()
    forward, retract = ModelRunner._forward_raw, ScheduleBatch.retract_decode
    trim = ScheduleBatch._evict_swa

    def counted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        found[batch.forward_mode.name] += 1
        return forward(self, batch, *args, **kwargs)

    def retracted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = retract(self, *args, **kwargs)
        found["retracted"] += len(result[0])
        return result

    def trimmed(self: Any, *args: Any, **kwargs: Any) -> Any:
        found["trimmed"] += 1
        return trim(self, *args, **kwargs)

    monkeypatch.setattr(ScheduleBatch, "_evict_swa", trimmed)
    # SGLang's own switch: every 16th batch takes requests back, as if memory were short.
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 16)
    monkeypatch.setattr(ModelRunner, "_forward_raw", counted)
    monkeypatch.setattr(ScheduleBatch, "retract_decode", retracted)
    return found


@pytest.mark.parametrize(("model", "where"), _WHERE)
def test_a_storm(
    make_rig: Any, seen: Counter[str], model: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "4")  # tokens that leave a window before it is trimmed
    rig = make_rig(model, **_SMALL, **where)
    assert rig.scheduler.enable_overlap is not where["disable_overlap_schedule"]
    rig.run(storm(rig))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert {"EXTEND", "MIXED", "DECODE", "retracted"} <= seen.keys()
    forwards = sum(seen[mode] for mode in ("EXTEND", "MIXED", "DECODE"))
    groups = [group.name for group in rig.adapter.groups]
    assert groups == (["full", "swa"] if model == "windows" else ["full"])
    assert bool(seen["trimmed"]) is (model == "windows")
    assert rig.canary.forwards.checked == dict.fromkeys(groups, forwards)
    for group in groups:
        counters = rig.counters(group)
        assert counters.verified[Phase.HEAD] > 20_000
        assert counters.verified[Phase.TAIL] > 20_000
        assert counters.verified[Phase.SWEEP]
        assert counters.hashed[Phase.SWEEP]
        assert counters.hashed[Phase.PATROL]
        assert counters.hashed[Phase.HIT] > 200
        assert not any(counters.unverified.values())
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig(model, **_SMALL, **where)
    plain.run(storm(plain))
    assert plain.answers == rig.answers


def counted(method: Any, name: str, seen: Counter[str]) -> Any:
    """The method, whose calls are counted under its name."""

    def call(*given: Any, **named: Any) -> Any:
        seen[name] += 1
        return method(*given, **named)

    return call


@pytest.mark.parametrize(
    ("model", "page", "busy"),
    [
        ("llama", 1, True), ("llama", 16, True), ("llama", 16, False), ("latent", 1, True),
        ("windows", 1, True), ("windows", 16, False),
    ],
)  # fmt: skip
def test_a_storm_whose_tables_are_copied(
    make_rig: Any, seen: Counter[str], model: str, page: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's forwards are checked with: views of copies, and checks that follow the launch.

    Those of a busy device's decodes are compared early, unless slots leave a window meanwhile; those of one
    that waits in line.
    """
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "4")
    monkeypatch.setattr(adapter, "concurrent", lambda device: True)
    monkeypatch.setattr(ForwardStream, "busy", busy)
    ways = "_early", "_in_line", "_next_to"
    for way in ways:
        monkeypatch.setattr(StreamHooks, way, counted(getattr(StreamHooks, way), way, seen))
    rig = make_rig(model, **_SMALL, page_size=page, disable_overlap_schedule=False)
    assert isinstance(rig.adapter._hooks, StreamHooks)
    rig.run(storm(rig))
    windows = model == "windows"
    assert [seen[way] > 40 for way in ways] == [busy and not windows, not busy, True], seen
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert {"EXTEND", "MIXED", "DECODE", "retracted"} <= seen.keys()
    assert bool(seen["trimmed"]) is windows
    for group in rig.adapter.groups:
        for phase in (Phase.HEAD, Phase.TAIL):
            assert rig.counters(group.name).verified[phase] > 20_000


@pytest.mark.parametrize("model", ["llama", "latent"])
@pytest.mark.parametrize(
    ("dtype", "kv", "width"),
    [
        ("bfloat16", "auto", 2),
        ("float16", "auto", 2),
        ("bfloat16", "fp8_e5m2", 1),
        ("bfloat16", "fp8_e4m3", 1),
    ],
)
def test_number_types(make_rig: Any, model: str, dtype: str, kv: str, width: int) -> None:
    rig = make_rig(model, dtype=dtype, kv_cache_dtype=kv)
    elements = {"llama": 32, "latent": 64 + 16}[model]
    assert {source.head_bytes for source in rig.adapter.groups[0].sources} == {elements * width}
    assert len(rig.adapter.groups[0].sources) == {"llama": 6, "latent": 3}[model]
    rig.generate(prompts(4))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("tree", ["rust", "python", "none"])
def test_each_of_the_trees(make_rig: Any, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's two cores of its radix tree, and a tree that takes nothing."""
    if tree == "none":
        rig = make_rig(disable_radix_cache=True)
    else:
        monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", tree)
        rig = make_rig(page_size=16)
        core = type(rig.scheduler.tree_cache.tree_core).__name__
        assert core.startswith("Rust") is (tree == "rust")
    rig.run(storm(rig, rounds=1))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert bool(rig.counters().verified[Phase.SWEEP]) is (tree != "none")

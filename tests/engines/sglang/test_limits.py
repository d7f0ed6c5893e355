"""What is refused by name. The stand-in has what a scheduler that is covered has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.limits import _CLASSES, _SETTINGS, check_scheduler
from canary_obs.errors import UnsupportedEngine


def scheduler(classes: dict[str, str] | None = None, **changed: Any) -> Any:
    found = {what: type(names[0], (), {})() for what, names in _CLASSES.items()}
    found |= {what: type(name, (), {})() for what, name in (classes or {}).items()}
    settings = {name: covered[0] for name, (covered, _) in _SETTINGS.items()}
    model = {"is_multimodal": False, "is_encoder_decoder": False}
    runner = SimpleNamespace(
        device=changed.pop("device", "cpu"),
        req_to_token_pool=found["request pool"],
        token_to_kv_pool_allocator=found["slot allocator"],
        token_to_kv_pool=found["KV pool"],
    )
    return SimpleNamespace(
        server_args=SimpleNamespace(**{name: changed.get(name, value) for name, value in settings.items()}),
        model_config=SimpleNamespace(**{name: changed.get(name, value) for name, value in model.items()}),
        tp_worker=SimpleNamespace(model_runner=runner),
        is_generation=changed.get("is_generation", True),
        tree_cache=found["prefix cache"],
    )


def test_what_is_covered_passes() -> None:
    check_scheduler(scheduler())
    check_scheduler(
        scheduler({"slot allocator": "PagedTokenToKVPoolAllocator", "KV pool": "MLATokenToKVPool"})
    )


@pytest.mark.parametrize("name", _SETTINGS)
def test_every_setting_that_is_not_covered_is_named(name: str) -> None:
    covered, _ = _SETTINGS[name]
    other = 2 if covered[0] == 1 else True
    with pytest.raises(UnsupportedEngine, match=rf"^SGLang with {name}={other!r} is not covered yet: .*"):
        check_scheduler(scheduler(**{name: other}))


@pytest.mark.parametrize("name", ["is_multimodal", "is_encoder_decoder"])
def test_models_that_are_not_covered_are_named(name: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"a model with {name} "):
        check_scheduler(scheduler(**{name: True}))


def test_models_that_do_not_generate_are_named() -> None:
    with pytest.raises(UnsupportedEngine, match="does not generate"):
        check_scheduler(scheduler(is_generation=False))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu"])
def test_devices_that_nobody_has_tried_are_named(device: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"device {device.partition(':')[0]} is not covered yet"):
        check_scheduler(scheduler(device=device))


@pytest.mark.parametrize("what", _CLASSES)
def test_memory_of_an_unknown_class_is_named(what: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"{what} AnotherClass is not covered yet"):
        check_scheduler(scheduler({what: "AnotherClass"}))


def with_windows(
    pool: str = "MHATokenToKVPool", allocator: str = "TokenToKVPoolAllocator", ring: bool = False
) -> Any:
    """A scheduler whose layers with a sliding window have pool and allocator of their own."""
    found = scheduler({"KV pool": "SWAKVPool", "slot allocator": "SWATokenToKVPoolAllocator"})
    runner = found.tp_worker.model_runner
    parts = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    parts[0].full_kv_pool, parts[0].swa_kv_pool = type("MHATokenToKVPool", (), {})(), type(pool, (), {})()
    parts[1].full_attn_allocator = type("TokenToKVPoolAllocator", (), {})()
    parts[1].swa_attn_allocator, parts[1].swa_req_ring = type(allocator, (), {})(), ring
    return found


def test_windows_are_covered() -> None:
    check_scheduler(with_windows())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"pool": "DSATokenToKVPool"}, "DSATokenToKVPool in its SWAKVPool"),
        ({"allocator": "AnotherAllocator"}, "AnotherAllocator in its allocator"),
        ({"ring": True}, "a ring of window slots per request"),
    ],
)
def test_parts_of_a_window_pool_that_are_not_covered_are_named(other: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"{named} is not covered yet"):
        check_scheduler(with_windows(**other))

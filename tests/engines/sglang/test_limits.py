"""What is refused by name. The stand-in has what a scheduler that is covered has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.deepseek_v4 import POOL
from canary_obs.engines.sglang.limits import (
    _CLASSES,
    _CLASSES_ON_GPUS,
    _ON_GPUS,
    _SETTINGS,
    _WITH_DRAFTS,
    _WITH_DRAFTS_ON_GPUS,
    _WITH_OWN_KEYS,
    _WITH_ROLES_ON_GPUS,
    _WITH_SEVERAL,
    _WITH_UNIFIED_MEMORY,
    check_scheduler,
)
from canary_obs.engines.sglang.untried import ROLES
from canary_obs.errors import UnsupportedEngine

CPU, GPU = "0.5.23", "0.5.16"
WINDOW = 64


def scheduler(classes: dict[str, str] | None = None, **changed: Any) -> Any:
    found = {what: type(names[0], (), {})() for what, names in _CLASSES.items()}
    found |= {what: type(name, (), {})() for what, name in (classes or {}).items()}
    settings = {name: covered for name, (covered, _) in _WITH_DRAFTS.items()}
    settings |= {name: covered for name, (covered, _) in (_WITH_DRAFTS_ON_GPUS | _WITH_SEVERAL).items()}
    settings |= {name: covered for name, (covered, _) in _WITH_ROLES_ON_GPUS.items()}
    settings |= {name: covered[0] for name, (covered, _) in (_SETTINGS | _ON_GPUS).items()}
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
    check_scheduler(scheduler(), CPU)
    check_scheduler(
        scheduler({"slot allocator": "PagedTokenToKVPoolAllocator", "KV pool": "MLATokenToKVPool"}), CPU
    )


@pytest.mark.parametrize("name", _SETTINGS)
def test_every_setting_that_is_not_covered_is_named(name: str) -> None:
    covered, _ = _SETTINGS[name]
    other = 2 if covered[0] == 1 else True
    with pytest.raises(UnsupportedEngine, match=rf"^SGLang with {name}={other!r} is not covered yet: .*"):
        check_scheduler(scheduler(**{name: other}), CPU)


@pytest.mark.parametrize("name", ["is_multimodal", "is_encoder_decoder"])
def test_models_that_are_not_covered_are_named(name: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"a model with {name} "):
        check_scheduler(scheduler(**{name: True}), CPU)


def test_models_that_do_not_generate_are_named() -> None:
    with pytest.raises(UnsupportedEngine, match="does not generate"):
        check_scheduler(scheduler(is_generation=False), CPU)


@pytest.mark.parametrize(("version", "device"), [(CPU, "cuda:1"), (CPU, "xpu"), (GPU, "cpu")])
def test_devices_that_nobody_has_tried_a_version_on_are_named(version: str, device: str) -> None:
    kind = device.partition(":")[0]
    with pytest.raises(
        UnsupportedEngine, match=rf"^SGLang {version} on {kind} is not covered yet: .* tested"
    ):
        check_scheduler(scheduler(device=device), version)


def on_gpu(classes: dict[str, str] | None = None, **changed: Any) -> Any:
    kinds = {what: names[0] for what, names in _CLASSES_ON_GPUS.items()} | (classes or {})
    return scheduler(kinds, device="cuda", **changed)


def test_what_is_covered_on_a_gpu_passes() -> None:
    check_scheduler(on_gpu(), GPU)


@pytest.mark.parametrize("name", [name for name in _ON_GPUS if name not in _SETTINGS])
def test_what_is_not_followed_on_gpus_is_named(name: str) -> None:
    check_scheduler(scheduler(**{name: True}), CPU)
    with pytest.raises(UnsupportedEngine, match=f"^SGLang with {name}=True is not covered yet: .* on GPU"):
        check_scheduler(on_gpu(**{name: True}), GPU)


def test_what_a_storage_keeps_is_not_followed_on_gpus() -> None:
    check_scheduler(scheduler(hicache_storage_backend="file"), CPU)
    with pytest.raises(
        UnsupportedEngine, match=r"hicache_storage_backend='file' .* KV that a storage keeps, on"
    ):
        check_scheduler(on_gpu(hicache_storage_backend="file"), GPU)


def test_a_hierarchical_cache_on_gpus_is_the_older_tree() -> None:
    """The adapter calls it untried."""
    tier: dict[str, Any] = {"enable_hierarchical_cache": True}
    check_scheduler(on_gpu({"prefix cache": "HiRadixCache"}, **tier), GPU)
    for name in ("UnifiedRadixCache", "RadixCache"):
        with pytest.raises(
            UnsupportedEngine, match=f"a hierarchical {name} is not covered yet: .* HiRadixCache"
        ):
            check_scheduler(on_gpu({"prefix cache": name}, **tier), GPU)


@pytest.mark.parametrize("name", ["tp_size", "dp_size", "pp_size"])
def test_ranks_on_gpus_pass(name: str) -> None:
    """Of those that nobody has tried the adapter says so."""
    check_scheduler(on_gpu(**{name: 2}), GPU)


def drafting(name: str = "MHATokenToKVPool", count: int = 1, **changed: Any) -> Any:
    """A scheduler with draft models whose KV is in pools of that class."""
    found = scheduler(speculative_algorithm="EAGLE", **changed)
    drafts = [SimpleNamespace(token_to_kv_pool=type(name, (), {})()) for _ in range(count)]
    found.draft_worker = SimpleNamespace(_draft_model_runners=lambda: drafts)
    return found


def test_both_roles_of_separated_servers_pass() -> None:
    check_scheduler(scheduler(disaggregation_mode="prefill"), CPU)
    check_scheduler(scheduler(disaggregation_mode="decode"), CPU)
    tier = {"enable_hierarchical_cache": True}
    stored = {"hicache_storage_backend": "file"}
    for role in ("prefill", "decode"):
        check_scheduler(scheduler(disaggregation_mode=role, **tier), CPU)
    check_scheduler(scheduler(disaggregation_mode="prefill", **tier, **stored), CPU)
    offloading = {"disaggregation_decode_enable_offload_kvcache": True}
    check_scheduler(scheduler(disaggregation_mode="decode", **stored, **offloading), CPU)
    with pytest.raises(UnsupportedEngine, match="disaggregation_mode='decode' with storage 'file' is"):
        check_scheduler(scheduler(disaggregation_mode="decode", **tier, **stored), CPU)
    states = scheduler(disaggregation_mode="prefill")
    states.tp_worker.model_runner.token_to_kv_pool.mamba_pool = object()
    states.tp_worker.model_runner.token_to_kv_pool.full_kv_pool = type("MHATokenToKVPool", (), {})()
    check_scheduler(states, CPU)
    both = scheduler(disaggregation_mode="prefill", **tier)
    both.tp_worker.model_runner.token_to_kv_pool.mamba_pool = object()
    with pytest.raises(UnsupportedEngine, match="states in a hierarchical cache"):
        check_scheduler(both, CPU)


@pytest.mark.parametrize("role", ROLES)
def test_what_separated_servers_on_gpus_are_covered_with(role: str) -> None:
    check_scheduler(on_gpu(disaggregation_mode=role), GPU)
    for setting in _WITH_ROLES_ON_GPUS:
        changed = on_gpu(disaggregation_mode=role, **{setting: True})
        match = rf"^SGLang with disaggregation_mode='{role}' on GPUs and {setting}=True is not covered yet"
        if setting == "enable_hierarchical_cache":
            changed.tree_cache = type("HiRadixCache", (), {})()
        if setting == "speculative_algorithm":
            changed.server_args.speculative_algorithm, match = "EAGLE", match.replace("True", "'EAGLE'")
        with pytest.raises(UnsupportedEngine, match=match):
            check_scheduler(changed, GPU)
    states = on_gpu(disaggregation_mode=role)
    states.tp_worker.model_runner.token_to_kv_pool.mamba_pool = object()
    with pytest.raises(UnsupportedEngine, match=f"disaggregation_mode='{role}' on GPUs and states"):
        check_scheduler(states, GPU)


def test_drafts_that_are_not_covered_are_named() -> None:
    check_scheduler(drafting(), CPU)
    check_scheduler(scheduler(speculative_algorithm="NGRAM"), CPU)
    for name, (covered, _) in _WITH_DRAFTS.items():
        other = {1: 2}.get(covered, not covered)
        with pytest.raises(
            UnsupportedEngine, match=rf"speculative_algorithm='EAGLE' and {name}={other!r} is"
        ):
            check_scheduler(drafting(**{name: other}), CPU)
    with pytest.raises(UnsupportedEngine, match="2 draft models without numbers"):
        check_scheduler(drafting(count=2), CPU)
    with pytest.raises(UnsupportedEngine, match="a draft model's SWAKVPool"):
        check_scheduler(drafting("SWAKVPool"), CPU)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_chains_of_drafts_pass_on_gpus(algorithm: str) -> None:
    """What their models write is left out, in pools of whatever class."""
    given = {"speculative_algorithm": algorithm, "speculative_eagle_topk": 1}
    check_scheduler(on_gpu(**given), GPU)
    for name, (covered, _) in _WITH_DRAFTS_ON_GPUS.items():
        other = {1: 2}.get(covered, not covered)
        match = rf"speculative_algorithm='{algorithm}' and {name}={other!r} is"
        with pytest.raises(UnsupportedEngine, match=match):
            check_scheduler(on_gpu({"prefix cache": "HiRadixCache"}, **given | {name: other}), GPU)
    with pytest.raises(UnsupportedEngine, match=r"'NGRAM' .* does not follow trees of drafts on GPUs"):
        check_scheduler(on_gpu(speculative_algorithm="NGRAM"), GPU)


def several(**changed: Any) -> Any:
    """A scheduler whose three draft models have pools for windows that are those of the target."""
    found = drafting("SWAKVPool", 3, **changed)
    windows = with_windows().tp_worker.model_runner
    windows.token_to_kv_pool_allocator.full_to_swa_index_mapping = mapping = object()
    windows.sliding_window_size = WINDOW
    vars(found.tp_worker.model_runner).update(vars(windows))
    for number, runner in enumerate(found.draft_worker._draft_model_runners()):
        runner.draft_model_idx, runner.sliding_window_size = number, WINDOW
        parts = {name: type("MHATokenToKVPool", (), {})() for name in ("full_kv_pool", "swa_kv_pool")}
        own = {"full_layer_nums": 0, "full_to_swa_index_mapping": mapping}
        vars(runner.token_to_kv_pool).update(parts, **own)
    return found


def test_several_draft_models_are_covered_by_themselves() -> None:
    check_scheduler(several(), CPU)
    plain = drafting(count=2)
    for number, runner in enumerate(plain.draft_worker._draft_model_runners()):
        runner.draft_model_idx = number
    check_scheduler(plain, CPU)
    for setting, (covered, _) in _WITH_SEVERAL.items():
        other = {"disaggregation_mode": "prefill", "enable_hierarchical_cache": True}.get(setting, 2)
        assert other != covered
        match = rf"^SGLang with several draft models and {setting}={other!r} is not covered yet"
        with pytest.raises(UnsupportedEngine, match=match):
            check_scheduler(several(**{setting: other}), CPU)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"full_layer_nums": 1}, "a draft model of full layers and windows"),
        ({"full_to_swa_index_mapping": object()}, "a draft model's own slots for windows"),
        ({"swa_kv_pool": object()}, "one of several draft models with a object"),
        (None, "a draft model's own window"),
    ],
)
def test_pools_of_several_draft_models_that_are_not_covered_are_named(changed: Any, named: str) -> None:
    found = several()
    last = found.draft_worker._draft_model_runners()[2]
    if changed is None:
        last.sliding_window_size += 1
    else:
        vars(last.token_to_kv_pool).update(changed)
    with pytest.raises(UnsupportedEngine, match=f"^SGLang with {named} is not covered yet"):
        check_scheduler(found, CPU)


def test_drafts_that_go_to_another_server_are_chains_of_eagle() -> None:
    for role in ROLES:
        check_scheduler(drafting(disaggregation_mode=role), CPU)
        tree, grams = drafting(disaggregation_mode=role), drafting(disaggregation_mode=role)
        tree.server_args.speculative_eagle_topk = 2
        grams.server_args.speculative_algorithm = "NGRAM"
        for found in (tree, grams):
            with pytest.raises(
                UnsupportedEngine, match=f"and disaggregation_mode='{role}' is not covered yet"
            ):
                check_scheduler(found, CPU)


def test_drafts_in_host_memory_are_copied_with_the_targets_full_layers() -> None:
    """To a host pool of their own, or as further layers of the target's (MTP)."""
    found = drafting(enable_hierarchical_cache=True)
    target, drafts = found.tp_worker.model_runner, found.draft_worker._draft_model_runners()
    entries = [
        SimpleNamespace(
            device_pool=runner.token_to_kv_pool,
            is_primary_index_anchor=runner is target,
            packed_draft_device_pools=(),
        )
        for runner in (target, *drafts)
    ]
    copied = SimpleNamespace(entry_map=dict(enumerate(entries)))
    found.tree_cache.cache_controller = SimpleNamespace(mem_pool_host=copied)
    check_scheduler(found, CPU)
    del copied.entry_map[1]
    refused = "KV of drafts that is not copied with the target's full layers"
    with pytest.raises(UnsupportedEngine, match=refused):
        check_scheduler(found, CPU)
    entries[0].packed_draft_device_pools = (drafts[0].token_to_kv_pool,)
    check_scheduler(found, CPU)
    found.server_args.disaggregation_mode = "prefill"
    with pytest.raises(UnsupportedEngine, match=refused):
        check_scheduler(found, CPU)
    found.server_args.disaggregation_mode = "null"
    entries[0].is_primary_index_anchor = False
    with pytest.raises(UnsupportedEngine, match=refused):
        check_scheduler(found, CPU)


@pytest.mark.parametrize("name", ["MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"])
def test_pools_that_nobody_has_tried_on_gpus_pass(name: str) -> None:
    """The adapter calls them untried."""
    check_scheduler(on_gpu({"KV pool": name}), GPU)


@pytest.mark.parametrize("name", ["DSATokenToKVPool", "MLATokenToKVPoolFP4"])
def test_pools_that_are_not_covered_on_gpus_are_named(name: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"KV pool {name} is not covered yet"):
        check_scheduler(on_gpu({"KV pool": name}), GPU)


def test_a_version_need_not_have_every_setting() -> None:
    found = scheduler()
    del found.server_args.enable_kv_cache_sharding
    check_scheduler(found, CPU)


@pytest.mark.parametrize("what", _CLASSES)
def test_memory_of_an_unknown_class_is_named(what: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"{what} AnotherClass is not covered yet"):
        check_scheduler(scheduler({what: "AnotherClass"}), CPU)


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
    check_scheduler(with_windows(), CPU)


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
        check_scheduler(with_windows(**other), CPU)


def of_kind(name: str, **given: Any) -> Any:
    """A scheduler whose KV pool is of that class and has these attributes."""
    settings = {key: given.pop(key) for key in list(given) if key in _WITH_OWN_KEYS}
    found = scheduler({"KV pool": name}, **settings)
    vars(found.tp_worker.model_runner.token_to_kv_pool).update(given)
    return found


def test_settings_that_are_not_covered_with_keys_of_their_own_are_named() -> None:
    kinds = {"index keys": ("DSATokenToKVPool", "index_key_cache"), "DeepSeek-V4": (POOL, "swa_kv_pool")}
    for what, (name, attribute) in kinds.items():
        check_scheduler(of_kind(name, **{attribute: object()}), CPU)
        for setting in _WITH_OWN_KEYS:
            other = {"speculative_algorithm": "NGRAM", "disaggregation_mode": "prefill"}.get(setting, True)
            match = rf"^SGLang with {what} and {setting}={other!r} is not covered yet"
            with pytest.raises(UnsupportedEngine, match=match):
                check_scheduler(of_kind(name, **{attribute: object(), setting: other}), CPU)


def unified(**settings: Any) -> Any:
    """A scheduler whose windows and full layers share their bytes."""
    parts = {name: type("UnifiedMHATokenToKVPool", (), {})() for name in ("full_kv_pool", "swa_kv_pool")}
    found = of_kind("UnifiedSWAKVPool", unified_buffer=object(), **parts)
    vars(found.server_args).update(settings)
    allocator = found.tp_worker.model_runner.token_to_kv_pool_allocator
    for name in ("full_attn_allocator", "swa_attn_allocator"):
        setattr(allocator, name, type("MultiEndedAllocator", (), {})())
    return found


def test_what_is_not_covered_in_unified_memory_is_named() -> None:
    check_scheduler(unified(), CPU)
    others = {"speculative_algorithm": "EAGLE", "disaggregation_mode": "prefill"}
    for setting in _WITH_UNIFIED_MEMORY:
        other = others.get(setting, True)
        with pytest.raises(UnsupportedEngine, match=rf"unified memory and {setting}={other!r} is not"):
            check_scheduler(unified(**{setting: other}), CPU)
    found = unified()
    found.tp_worker.model_runner.token_to_kv_pool.swa_kv_pool = type("MHATokenToKVPool", (), {})()
    with pytest.raises(
        UnsupportedEngine, match=r"^SGLang with MHATokenToKVPool in its UnifiedSWAKVPool is not"
    ):
        check_scheduler(found, CPU)
    found = unified()
    allocator = found.tp_worker.model_runner.token_to_kv_pool_allocator
    allocator.swa_attn_allocator = type("FloatMultiEndedAllocator", (), {})()
    with pytest.raises(UnsupportedEngine, match="FloatMultiEndedAllocator in its allocator is not covered"):
        check_scheduler(found, CPU)


def with_states(part: str = "MHATokenToKVPool", **settings: Any) -> Any:
    """A scheduler whose model has layers of linear attention beside those of that pool."""
    pool = {"mamba_pool": object(), "full_kv_pool": type(part, (), {})()}
    return of_kind("HybridLinearKVPool", **pool, **settings)


def test_states_are_taken_with_the_pools_that_are_covered_beside_them() -> None:
    check_scheduler(with_states(), CPU)
    check_scheduler(with_states("MLATokenToKVPool"), CPU)
    with pytest.raises(UnsupportedEngine, match="AnotherPool in its HybridLinearKVPool is not covered yet"):
        check_scheduler(with_states("AnotherPool"), CPU)


def test_what_is_not_covered_beside_states_is_named() -> None:
    with pytest.raises(UnsupportedEngine, match="states in a hierarchical cache is not covered yet"):
        check_scheduler(with_states(enable_hierarchical_cache=True), CPU)
    with pytest.raises(UnsupportedEngine, match="'NGRAM' and states is not covered yet"):
        check_scheduler(with_states(speculative_algorithm="NGRAM"), CPU)

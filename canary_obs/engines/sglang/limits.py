"""What this adapter does not cover yet: settings, models and memory layouts that are refused by name."""

from __future__ import annotations

from typing import Any

from canary_obs.engines.sglang.chunk_cache import CHUNK_CACHES
from canary_obs.engines.sglang.deepseek_v4 import POOL, is_deepseek_v4
from canary_obs.engines.sglang.groups import has_states, has_windows
from canary_obs.engines.sglang.host_tier import copied_to_host, host_controller
from canary_obs.engines.sglang.index_keys import has_index_keys
from canary_obs.engines.sglang.physical_slots import is_unified
from canary_obs.engines.sglang.settings import settings_of
from canary_obs.engines.sglang.several_drafts import are_several
from canary_obs.engines.sglang.speculation import KNOWN_ALGORITHMS, draft_runners, drafts_trees
from canary_obs.engines.sglang.untried import ROLES
from canary_obs.engines.sglang.versions import check_device
from canary_obs.errors import UnsupportedEngine

# Setting of SGLang -> the values that are covered, and what the others would take.
_SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "dcp_size": ((1,), "a request's slots that are spread over ranks"),
    "attn_cp_size": ((1,), "a request's tokens that are spread over ranks"),
    "speculative_algorithm": ((None, *KNOWN_ALGORITHMS), "its drafts"),
    "hicache_storage_backend": ((None, "file"), "KV that another storage keeps"),
    "hicache_host_memory_mode": (("cache",), "KV that passes through the host only"),
    "enable_lmcache": ((False,), "KV that LMCache loads"),
    "enable_flexkv": ((False,), "KV that FlexKV loads"),
    "enable_unified_cache_external_linker": ((False,), "KV that an external cache loads"),
    "enable_hisparse": ((False,), "slots that move between host and device"),
    "enable_kv_cache_sharding": ((False,), "a cache that is spread over ranks"),
    "disaggregation_mode": (("null", *ROLES), "this role"),
    "enable_pd_role_switch": ((False,), "servers that change their role"),
    "disaggregation_decode_host_receive_threshold": ((1.0,), "KV that is received in host memory"),
    "enable_pdmux": ((False,), "prefills that are split into several forwards"),
    "dllm_algorithm": ((None,), "diffusion models, which write a slot several times"),
    "enable_streaming_session": ((False,), "slots that a session keeps between requests"),
    "enable_session_radix_cache": ((False,), "slots that a session keeps between requests"),
    "enable_two_batch_overlap": ((False,), "batches that are split in two"),
    "enable_encoder_swa_bounded_replay": ((False,), "forwards that compute tokens again"),
    "enable_decoder_swa_bounded_replay": ((False, None), "forwards that compute tokens again"),
    "prefill_only_disable_kv_cache": ((False,), "a model without KV cache"),
}

# More of them on a GPU.
_ON_GPUS: dict[str, tuple[tuple[object, ...], str]] = {
    "enable_unified_memory": ((False,), "KV that moves within its memory on GPUs"),
    "enable_page_major_kv_layout": ((False,), "the page-major layout on GPUs"),
    "hicache_storage_backend": ((None,), "KV that a storage keeps, on GPUs"),
    "speculative_algorithm": ((None, "EAGLE", "EAGLE3", "STANDALONE"), "trees of drafts on GPUs"),
}

_CLASSES = {
    "request pool": (
        "ReqToTokenPool",
        "HybridReqToTokenPool",
        "DecodeReqToTokenPool",
        "HybridMambaDecodeReqToTokenPool",
        "UnifiedHybridReqToTokenPool",
    ),
    "slot allocator": (
        "TokenToKVPoolAllocator",
        "PagedTokenToKVPoolAllocator",
        "SWATokenToKVPoolAllocator",
        "UnifiedSWATokenToKVPoolAllocator",
        "UnifiedMambaTokenToKVPoolAllocator",
    ),
    "KV pool": (
        "MHATokenToKVPool",
        "MLATokenToKVPool",
        "DSATokenToKVPool",
        "SWAKVPool",
        "UnifiedSWAKVPool",
        "HybridLinearKVPool",
        "UnifiedHybridLinearKVPool",
        POOL,
    ),
    "prefix cache": ("UnifiedRadixCache",),
}
_CLASSES_ON_GPUS = {
    "slot allocator": (
        "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator",
    ),
    "KV pool": ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"),
    "prefix cache": ("RadixCache", "UnifiedRadixCache", "HiRadixCache", *CHUNK_CACHES),
}  # fmt: skip


def check_scheduler(scheduler: Any, version: str) -> None:
    """Raises UnsupportedEngine for a scheduler with settings, a model or memory that is not covered yet."""
    arguments, runner = settings_of(scheduler), scheduler.tp_worker.model_runner
    model = scheduler.model_config
    device = str(runner.device).partition(":")[0]
    check_device(version, device)
    for name, (covered, needs) in (_SETTINGS if device == "cpu" else _SETTINGS | _ON_GPUS).items():
        # Not every version has every setting.
        if (value := getattr(arguments, name, covered[0])) not in covered:
            raise _refused(f"{name}={value!r}", needs, f"{name}={covered[0]!r}")
    for name in ("is_multimodal", "is_encoder_decoder"):
        if getattr(model, name):
            raise _refused(f"a model with {name}", "tokens that are not in its token lists", "text models")
    if not scheduler.is_generation:
        raise _refused("a model that does not generate", "its forwards", "models that generate")
    found = {
        "request pool": runner.req_to_token_pool,
        "slot allocator": runner.token_to_kv_pool_allocator,
        "KV pool": runner.token_to_kv_pool,
        "prefix cache": scheduler.tree_cache,
    }
    classes = _CLASSES if device == "cpu" else _CLASSES | _CLASSES_ON_GPUS
    for what, thing in found.items():
        if (name := type(thing).__name__) not in classes[what]:
            raise _refused(f"{what} {name}", "its slots", " and ".join(classes[what]))
    tree = type(scheduler.tree_cache).__name__
    if device != "cpu" and arguments.enable_hierarchical_cache and tree != "HiRadixCache":
        raise _refused(f"a hierarchical {tree}", "KV that moves there, on GPUs", "a HiRadixCache")
    if has_windows(runner.token_to_kv_pool) and hasattr(
        runner.token_to_kv_pool_allocator, "full_attn_allocator"
    ):
        _check_windows(runner)
    if is_unified(runner.token_to_kv_pool):
        _check_alone("unified memory", arguments, _WITH_UNIFIED_MEMORY)
    if has_index_keys(runner.token_to_kv_pool):
        _check_alone("index keys", arguments, _WITH_OWN_KEYS)
    if is_deepseek_v4(runner.token_to_kv_pool):
        _check_alone("DeepSeek-V4", arguments, _WITH_OWN_KEYS)
    if (role := arguments.disaggregation_mode) in ROLES:
        _check_role(role, arguments, runner.token_to_kv_pool, on_gpu=device != "cpu")
    if arguments.speculative_algorithm is not None:
        _check_drafts(scheduler, on_gpu=device != "cpu")
    if has_states(runner.token_to_kv_pool):
        if arguments.enable_hierarchical_cache:
            raise _refused("states in a hierarchical cache", "KV that moves there", "one or the other")
        part = type(runner.token_to_kv_pool.full_kv_pool).__name__
        known = "MHATokenToKVPool", "MLATokenToKVPool"
        if is_unified(runner.token_to_kv_pool):
            known = "UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool"
        if part not in known:
            name = type(runner.token_to_kv_pool).__name__
            raise _refused(f"{part} in its {name}", "its slots", " and ".join(known))


# On GPUs, of a server that prefills or decodes only: setting -> its covered value, and what the others take.
_WITH_ROLES_ON_GPUS: dict[str, tuple[object, str]] = {
    "speculative_algorithm": (None, "drafts that go to another server"),
    "enable_hierarchical_cache": (False, "KV that moves to the host, and between servers"),
    "disaggregation_decode_enable_radix_cache": (False, "KV that a server has, and is sent"),
    "disaggregation_decode_enable_offload_kvcache": (False, "KV that it stores"),
}


def _check_role(role: str, arguments: Any, pool: Any, *, on_gpu: bool) -> None:
    """Of a server that prefills or decodes only."""
    if on_gpu:
        _check_alone(f"disaggregation_mode={role!r} on GPUs", arguments, _WITH_ROLES_ON_GPUS)
        if has_states(pool):
            what = f"disaggregation_mode={role!r} on GPUs and states"
            raise _refused(what, "states that go to another server", "models without")
    storage = arguments.hicache_storage_backend
    if role == "decode" and arguments.enable_hierarchical_cache and storage is not None:
        what = f"a hierarchical cache and disaggregation_mode={role!r} with storage {storage!r}"
        raise _refused(what, "KV that is loaded while other KV arrives", "no storage")


# With index keys or compressed entries: setting -> its covered value, and what the others would take.
_WITH_OWN_KEYS: dict[str, tuple[object, str]] = {
    "speculative_algorithm": (None, "such keys of drafts"),
    "enable_hierarchical_cache": (False, "such keys that move to the host and back"),
}


# With unified memory, the same.
_WITH_UNIFIED_MEMORY: dict[str, tuple[object, str]] = {
    "speculative_algorithm": (None, "drafts that lie in the entries of its slots"),
    "enable_hierarchical_cache": (False, "its KV that moves to the host and back"),
    "disaggregation_mode": ("null", "its KV that goes to or comes from another server"),
}


def _check_alone(what: str, arguments: Any, settings: dict[str, tuple[object, str]]) -> None:
    """Settings that go with what the adapter covers without them."""
    for name, (covered, needs) in settings.items():
        if (value := getattr(arguments, name)) != covered:
            raise _refused(f"{what} and {name}={value!r}", needs, f"{name}={covered!r}")


# With speculation: setting -> its covered value, and what the others would take.
_WITH_DRAFTS: dict[str, tuple[object, str]] = {
    "pp_size": (1, "drafts of a pipeline"),
    "attn_dp_size": (1, "drafts while other ranks prefill"),
    "disable_overlap_schedule": (True, "drafts while the next batch is prepared"),
}


# On GPUs, where their own KV is left out, the same.
_WITH_DRAFTS_ON_GPUS: dict[str, tuple[object, str]] = {
    "speculative_eagle_topk": (1, "trees of drafts on GPUs"),
    "pp_size": (1, "drafts of a pipeline"),
}


# With several draft models, the same.
_WITH_SEVERAL: dict[str, tuple[object, str]] = {
    "speculative_eagle_topk": (1, "trees of their drafts"),
    "enable_hierarchical_cache": (False, "their KV that moves to the host and back"),
    "disaggregation_mode": ("null", "their KV that goes to or comes from another server"),
    "tp_size": (1, "their KV on several ranks"),
}


# Algorithms whose drafts' KV goes from a prefill server to a decode server.
_SENT = ("EAGLE", "EAGLE3")


def _check_drafts(scheduler: Any, *, on_gpu: bool) -> None:
    """A draft model's runner and pool, and the settings that go with it."""
    arguments = settings_of(scheduler)
    algorithm = f"speculative_algorithm={arguments.speculative_algorithm!r}"
    for name, (covered, needs) in (_WITH_DRAFTS_ON_GPUS if on_gpu else _WITH_DRAFTS).items():
        # 0.5.16 has no attn_dp_size.
        if (value := getattr(arguments, name, covered)) != covered:
            raise _refused(f"{algorithm} and {name}={value!r}", needs, f"{name}={covered!r}")
    if arguments.disaggregation_mode in ROLES and (
        arguments.speculative_algorithm not in _SENT or drafts_trees(arguments)
    ):
        raise _refused(
            f"{algorithm} and disaggregation_mode={arguments.disaggregation_mode!r}",
            "drafts that go to another server", f"chains of {' and '.join(_SENT)}",
        )  # fmt: skip
    if has_states(scheduler.tp_worker.model_runner.token_to_kv_pool):
        raise _refused(f"{algorithm} and states", "states of drafts that are rejected", "models without")
    if on_gpu:
        return
    runners = draft_runners(scheduler)
    if are_several(runners):
        _check_alone("several draft models", arguments, _WITH_SEVERAL)
        for runner in runners:
            _check_one_of_several(runner, scheduler.tp_worker.model_runner)
        return
    if len(runners) > 1:
        raise _refused(f"{len(runners)} draft models without numbers", "their forwards", "one of them")
    for runner in runners:
        if (name := type(runner.token_to_kv_pool).__name__) not in (known := _CLASSES["KV pool"][:2]):
            raise _refused(f"a draft model's {name}", "its slots", " and ".join(known))
        packed = arguments.disaggregation_mode not in ROLES  # in pairs these have not been run
        if not copied_to_host(host_controller(scheduler), runner.token_to_kv_pool, packed=packed):
            raise _refused(
                f"{algorithm} and KV of drafts that is not copied with the target's full layers",
                "its host slots", "a host pool of its own, or, of no pair of servers, layers in theirs",
            )  # fmt: skip


def _check_one_of_several(runner: Any, target: Any) -> None:
    """The pool of one of several draft models: of MHA, for all its layers or for none with a window."""
    pool = runner.token_to_kv_pool
    parts: tuple[Any, ...] = (pool,)
    if has_windows(pool):
        parts = (pool.full_kv_pool, pool.swa_kv_pool)
        if pool.full_layer_nums:
            raise _refused("a draft model of full layers and windows", "both", "one of them")
        mapping = target.token_to_kv_pool_allocator.full_to_swa_index_mapping
        if pool.full_to_swa_index_mapping is not mapping:
            raise _refused("a draft model's own slots for windows", "these", "the target's")
        if runner.sliding_window_size != target.sliding_window_size:
            raise _refused("a draft model's own window", "what it reads", "the target's window")
    for part in parts:
        if (name := type(part).__name__) != (known := _CLASSES["KV pool"][0]):
            raise _refused(f"one of several draft models with a {name}", "its slots", known)


def _check_windows(runner: Any) -> None:
    """The parts of a pool and an allocator for sliding windows, which are pools and allocators themselves."""
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    pools, allocators = ("MHATokenToKVPool",), _CLASSES["slot allocator"][:2]
    if is_unified(pool):
        pools, allocators = ("UnifiedMHATokenToKVPool",), ("MultiEndedAllocator",)
    for part in () if is_deepseek_v4(pool) else (pool.full_kv_pool, pool.swa_kv_pool):
        if (name := type(part).__name__) not in pools:
            raise _refused(f"{name} in its {type(pool).__name__}", "its slots", *pools)
    for part in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        if (name := type(part).__name__) not in allocators:
            raise _refused(f"{name} in its allocator", "its slots", " and ".join(allocators))
    if getattr(allocator, "swa_req_ring", False):
        raise _refused("a ring of window slots per request", "its slots", "slots that are allocated")


def _refused(what: str, needs: str, covered: str) -> UnsupportedEngine:
    return UnsupportedEngine(
        f"SGLang with {what} is not covered yet: this adapter does not follow {needs}; covered is {covered}. "
        "Use that, or run without the canary"
    )

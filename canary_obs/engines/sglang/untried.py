"""What has not been run to its end: servers that prefill or decode only as pairs, and engines on GPUs."""

from __future__ import annotations

from typing import Any

from canary_obs.engines.sglang.deepseek_v4 import POOL

ROLES = ("prefill", "decode")
_TRIED_BACKENDS = ("nixl", "mooncake")  # of `disaggregation_transfer_backend`: those of which pairs were run
_TRIED_POOLS = (
    "MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool", "SWAKVPool",
    "HybridLinearKVPool of MHATokenToKVPool", POOL,
)  # fmt: skip
_TRIED_WITH_FEATURES = {"disaggregation_transfer_backend": "nixl", "tp_size": 1}
_RANKS = ("pp_size", "dp_size", "attn_dp_size")
_TRIED_POOLS_ON_GPUS = (
    "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool of MHATokenToKVPool",
)  # fmt: skip
_TRIED_TREES_ON_GPUS = ("RadixCache", "UnifiedRadixCache", "HiRadixCache")
_TRIED_DRAFTS_ON_GPUS = _TRIED_POOLS_ON_GPUS[:2]  # with drafts, by one rank
_TRIED_RANKS_ON_GPUS = {  # with one of these settings alone, the pools
    "tp_size": _TRIED_POOLS_ON_GPUS[:3],
    "dp_size": _TRIED_POOLS_ON_GPUS[:1],
    "pp_size": _TRIED_POOLS_ON_GPUS[:1],
    "enable_dp_attention": _TRIED_POOLS_ON_GPUS[1:2],
}


def untried_pair(arguments: Any, pool: Any) -> str | None:
    """What of a server's place in a pair has not been run to its end; None = nothing."""
    if arguments.disaggregation_mode not in ROLES:
        return None
    pair = "prefill and decode on different servers of SGLang"
    if (backend := arguments.disaggregation_transfer_backend) not in _TRIED_BACKENDS:
        return f"{pair} over {backend}: tested are those over {', '.join(_TRIED_BACKENDS)}"
    if (held := _name_of(pool)) not in _TRIED_POOLS:
        return f"{pair} with a {held}: tested are those with {', '.join(_TRIED_POOLS)}"
    for name in _RANKS:
        if (value := getattr(arguments, name, 1)) > 1:  # SGLang 0.5.16 has no attn_dp_size
            return f"{pair} with {name}={value}: tested are those of tensor ranks"
    features = ["drafts"] if arguments.speculative_algorithm is not None else []
    features += ["a hierarchical cache"] if arguments.enable_hierarchical_cache else []
    features += ["KV that is stored"] if arguments.disaggregation_decode_enable_offload_kvcache else []
    for what in features:
        if held != _TRIED_POOLS[0]:
            return f"{pair} with {what} and a {held}: tested are those with {_TRIED_POOLS[0]}"
        for name, tried in _TRIED_WITH_FEATURES.items():
            if (value := getattr(arguments, name)) != tried:
                return f"{pair} with {what} and {name}={value}: tested are those with {tried}"
    return None


def untried_on_gpus(arguments: Any, pool: Any, tree: Any) -> str | None:
    """What of an engine on GPUs has not been run there; None = nothing. `tree`: its prefix cache."""
    held, cache = _name_of(pool), type(tree).__name__
    for name, tried in ((held, _TRIED_POOLS_ON_GPUS), (cache, _TRIED_TREES_ON_GPUS)):
        if name not in tried:
            return f"SGLang on GPUs with a {name}: tested are those with {', '.join(tried)}"
    ranks = {name: value for name in _TRIED_RANKS_ON_GPUS if (value := getattr(arguments, name)) > 1}
    if arguments.enable_dp_attention:  # of as many ranks as replicas, each of which has its own requests
        ranks = ranks | {"enable_dp_attention": True}
        ranks.pop("dp_size", None)
        if arguments.tp_size == arguments.dp_size:
            ranks.pop("tp_size", None)
    said = " and ".join(f"{name}={value}" for name, value in ranks.items())
    if (algorithm := arguments.speculative_algorithm) is not None:
        drafts = f"SGLang on GPUs with speculative_algorithm={algorithm}"
        if getattr(arguments, "enable_multi_layer_eagle", False):
            return f"{drafts} and several draft models: tested is one"
        if held not in _TRIED_DRAFTS_ON_GPUS:
            return f"{drafts} and a {held}: tested are those with {', '.join(_TRIED_DRAFTS_ON_GPUS)}"
        if ranks:
            return f"{drafts} and {said}: tested is each by itself"
    if cache == _TRIED_TREES_ON_GPUS[2] and (held != _TRIED_POOLS_ON_GPUS[0] or ranks):
        with_ranks = f" and {said}" if ranks else ""
        tested = f"{_TRIED_POOLS_ON_GPUS[0]} on one rank"
        return f"SGLang on GPUs with a {cache}, a {held}{with_ranks}: tested is one with a {tested}"
    if len(ranks) > 1:
        return f"SGLang on GPUs with {said}: tested is each by itself"
    for pools in (_TRIED_RANKS_ON_GPUS[name] for name in ranks):
        if held not in pools:
            return f"SGLang on GPUs with {said} and a {held}: tested are those with {', '.join(pools)}"
    return None


def _name_of(pool: Any) -> str:
    """Of its class; of a pool that has states as well, with that of its full layers."""
    name, full = type(pool).__name__, getattr(pool, "full_kv_pool", None)
    return f"{name} of {type(full).__name__}" if name == "HybridLinearKVPool" else name

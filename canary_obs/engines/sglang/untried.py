"""What has not been run to its end: servers that prefill or decode only as pairs, and engines on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canary_obs.engines.sglang.chunk_cache import CHUNK_CACHES
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
# Of a pair on GPUs, each on one rank.
_TRIED_PAIRS_ON_GPUS = _TRIED_POOLS_ON_GPUS[:3]
_HIERARCHICAL = "HiRadixCache"
_TRIED_TREES_ON_GPUS = ("RadixCache", "UnifiedRadixCache", _HIERARCHICAL)
# By algorithm, in chains, on one rank with the first of these trees.
_TRIED_DRAFTS_ON_GPUS = {
    "STANDALONE": _TRIED_POOLS_ON_GPUS[:3], "EAGLE": _TRIED_POOLS_ON_GPUS[:2],
    "EAGLE3": _TRIED_POOLS_ON_GPUS[:1],
}  # fmt: skip
# Of those, by algorithm and pool: with one of these settings, or with another tree.
_TRIED_DRAFTS_WITH = {
    ("STANDALONE", _TRIED_POOLS_ON_GPUS[0]): ("tp_size", *_TRIED_TREES_ON_GPUS[1:]),
    ("STANDALONE", _TRIED_POOLS_ON_GPUS[2]): _TRIED_TREES_ON_GPUS[1:2],
    ("EAGLE", _TRIED_POOLS_ON_GPUS[1]): ("enable_dp_attention", _HIERARCHICAL),
}
# With the last of these trees: policies that write to the host.
_TRIED_POLICIES_ON_GPUS = {"write_through": _TRIED_POOLS_ON_GPUS[:2], "write_back": _TRIED_POOLS_ON_GPUS[:1]}
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
    separated = arguments.disaggregation_mode in ROLES
    trees = (*_TRIED_TREES_ON_GPUS, *(CHUNK_CACHES if separated else ()))
    for name, tried in ((held, _TRIED_POOLS_ON_GPUS), (cache, trees)):
        if name not in tried:
            return f"SGLang on GPUs with a {name}: tested are those with {', '.join(tried)}"
    ranks = {name: value for name in _TRIED_RANKS_ON_GPUS if (value := getattr(arguments, name)) > 1}
    if arguments.enable_dp_attention:  # of as many ranks as replicas, each of which has its own requests
        ranks = ranks | {"enable_dp_attention": True}
        ranks.pop("dp_size", None)
        if arguments.tp_size == arguments.dp_size:
            ranks.pop("tp_size", None)
    said = " and ".join(f"{name}={value}" for name, value in ranks.items())
    if separated:
        return _untried_pair_on_gpus(arguments, held, said)
    if (algorithm := arguments.speculative_algorithm) is not None:
        return _untried_drafts(arguments, algorithm, held, cache, ranks)
    if cache == _HIERARCHICAL:
        return _untried_host_tier(arguments, held, said)
    if len(ranks) > 1:
        return f"SGLang on GPUs with {said}: tested is each by itself"
    for pools in (_TRIED_RANKS_ON_GPUS[name] for name in ranks):
        if held not in pools:
            return f"SGLang on GPUs with {said} and a {held}: tested are those with {', '.join(pools)}"
    return None


def _untried_pair_on_gpus(arguments: Any, held: str, ranks: str) -> str | None:
    """`held`: class of the pool; `ranks`: settings of several."""
    pair = "prefill and decode on different servers of SGLang on GPUs"
    if (backend := arguments.disaggregation_transfer_backend) != _TRIED_BACKENDS[0]:
        return f"{pair} over {backend}: tested are those over {_TRIED_BACKENDS[0]}"
    if held not in _TRIED_PAIRS_ON_GPUS:
        return f"{pair} with a {held}: tested are those with {', '.join(_TRIED_PAIRS_ON_GPUS)}"
    return f"{pair} with {ranks}: tested are those of one rank" if ranks else None


def _untried_drafts(
    arguments: Any, algorithm: str, held: str, cache: str, ranks: Mapping[str, object]
) -> str | None:
    """`held` and `cache`: classes of the pool and the prefix cache; `ranks`: settings of several, if any."""
    drafts = f"SGLang on GPUs with speculative_algorithm={algorithm}"
    if (pools := _TRIED_DRAFTS_ON_GPUS.get(algorithm)) is None:
        return f"{drafts}: tested are {', '.join(_TRIED_DRAFTS_ON_GPUS)}"
    for name in ("enable_multi_layer_eagle", "speculative_adaptive"):
        if getattr(arguments, name, False):
            return f"{drafts} and {name}=True: tested is one model that drafts equally far each time"
    if held not in pools:
        return f"{drafts} and a {held}: tested are those with {', '.join(pools)}"
    others = {name: f"{name}={value}" for name, value in ranks.items()}
    others |= {cache: f"a {cache}"} if cache != _TRIED_TREES_ON_GPUS[0] else {}
    if len(others) > 1 or not others.keys() <= set(_TRIED_DRAFTS_WITH.get((algorithm, held), ())):
        return f"{drafts}, a {held} and {' and '.join(others.values())}: nobody has run these together"
    if cache == _HIERARCHICAL and (policy := arguments.hicache_write_policy) != "write_through":
        return f"{drafts} and hicache_write_policy={policy}: tested is write_through"
    return None


def _untried_host_tier(arguments: Any, held: str, ranks: str) -> str | None:
    tier, policy = f"SGLang on GPUs with a {_HIERARCHICAL}", arguments.hicache_write_policy
    if (pools := _TRIED_POLICIES_ON_GPUS.get(policy)) is None:
        return f"{tier} and hicache_write_policy={policy}: tested are {', '.join(_TRIED_POLICIES_ON_GPUS)}"
    if held not in pools:
        return f"{tier}, hicache_write_policy={policy} and a {held}: tested are those with {', '.join(pools)}"
    return f"{tier} and {ranks}: tested is each by itself" if ranks else None


def _name_of(pool: Any) -> str:
    """Of its class; of a pool that has states as well, with that of its full layers."""
    name, full = type(pool).__name__, getattr(pool, "full_kv_pool", None)
    return f"{name} of {type(full).__name__}" if name == "HybridLinearKVPool" else name

"""What of an engine has not been run to its end is named; the canary attaches, and says `degraded`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang.untried import (
    _TRIED_PAIRS_ON_GPUS,
    _TRIED_POOLS,
    _TRIED_POOLS_ON_GPUS,
    untried_on_gpus,
    untried_pair,
)

_TIER = {"enable_hierarchical_cache": True, "pool": "MHATokenToKVPool", "disaggregation_mode": "prefill"}
_OFFLOADS = {"disaggregation_decode_enable_offload_kvcache": True, "pool": "MHATokenToKVPool"}
_DRAFTS = {"speculative_algorithm": "EAGLE", "pool": "MHATokenToKVPool"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"disaggregation_mode": "null", "disaggregation_transfer_backend": "mori"}, None),
        ({"disaggregation_transfer_backend": "mooncake"}, None),
        ({"disaggregation_transfer_backend": "mori"}, "over mori: tested are those over nixl, mooncake"),
        ({"tp_size": 2}, None),
        ({"pp_size": 2}, "with pp_size=2: tested are those of tensor ranks"),
        ({"dp_size": 2}, "with dp_size=2: tested are those of tensor ranks"),
        ({"attn_dp_size": 2}, "with attn_dp_size=2: tested are those of tensor ranks"),
        ({"disaggregation_decode_enable_radix_cache": True}, None),
        (
            {"disaggregation_mode": "prefill", "pool": "MHATokenToKVPoolFP4"},
            f"with a MHATokenToKVPoolFP4: tested are those with {', '.join(_TRIED_POOLS)}",
        ),
        (
            {"pool": "HybridLinearKVPool"},  # of latent vectors, or others
            f"with a HybridLinearKVPool of NoneType: tested are those with {', '.join(_TRIED_POOLS)}",
        ),
        (_DRAFTS, None),
        (
            _DRAFTS | {"pool": "SWAKVPool"},
            "with drafts and a SWAKVPool: tested are those with MHATokenToKVPool",
        ),
        (_TIER, None),
        (
            _TIER | {"pool": "MLATokenToKVPool"},
            "with a hierarchical cache and a MLATokenToKVPool: tested are those with MHATokenToKVPool",
        ),
        (_TIER | {"disaggregation_mode": "decode"}, None),
        (_OFFLOADS, None),
        (_OFFLOADS | {"tp_size": 2}, "with KV that is stored and tp_size=2: tested are those with 1"),
        (_TIER | {"tp_size": 2}, "with a hierarchical cache and tp_size=2: tested are those with 1"),
        (_DRAFTS | {"tp_size": 2}, "with drafts and tp_size=2: tested are those with 1"),
        (
            _DRAFTS | {"disaggregation_transfer_backend": "mooncake"},
            "with drafts and disaggregation_transfer_backend=mooncake: tested are those with nixl",
        ),
    ],
)
def test_pairs_that_were_not_run_are_untried(given: dict[str, Any], reason: str | None) -> None:
    run = {
        "disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl",
        "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "pool": "SWAKVPool",
        "speculative_algorithm": None, "enable_hierarchical_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
    } | given  # fmt: skip
    untried = untried_pair(SimpleNamespace(**run), type(run.pop("pool"), (), {})())
    assert (untried or "").endswith(reason or "")
    assert (untried is None) == (reason is None)


_OVER_DATA = {"enable_dp_attention": True}
_SEPARATED = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "nixl",
    "tree": "ChunkCache",
}
_PAIR = "prefill and decode on different servers of SGLang on GPUs"
_ON_GPUS = "MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, HybridLinearKVPool of MHATokenToKVPool"


@pytest.mark.parametrize(
    ("pool", "given", "reason"),
    [
        ("MHATokenToKVPool", {}, None),
        *((pool, {"tp_size": 8}, None) for pool in _TRIED_POOLS_ON_GPUS[:3]),
        ("MHATokenToKVPool", {"dp_size": 8}, None),
        ("MHATokenToKVPool", {"pp_size": 2}, None),
        ("MLATokenToKVPool", {}, None),
        ("MLATokenToKVPool", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, None),
        ("SWAKVPool", {"tree": "UnifiedRadixCache"}, None),
        ("HybridLinearKVPool", {"full": "MHATokenToKVPool"}, None),
        (
            "HybridLinearKVPool",
            {"full": "MLATokenToKVPool"},
            f"SGLang on GPUs with a HybridLinearKVPool of MLATokenToKVPool: tested are those with {_ON_GPUS}",
        ),
        (
            "MHATokenToKVPool",
            {"tree": "ChunkCache"},
            "SGLang on GPUs with a ChunkCache: tested are those with RadixCache, UnifiedRadixCache, "
            "HiRadixCache",
        ),
        *((pool, _SEPARATED, None) for pool in _TRIED_PAIRS_ON_GPUS),
        (
            "HybridLinearKVPool",
            {"full": "MHATokenToKVPool"} | _SEPARATED,
            f"{_PAIR} with a HybridLinearKVPool of MHATokenToKVPool: tested are those with "
            "MHATokenToKVPool, MLATokenToKVPool, SWAKVPool",
        ),
        (
            "MHATokenToKVPool",
            _SEPARATED | {"disaggregation_transfer_backend": "mooncake"},
            f"{_PAIR} over mooncake: tested are those over nixl",
        ),
        (
            "MHATokenToKVPool",
            _SEPARATED | {"tp_size": 2},
            f"{_PAIR} with tp_size=2: tested are those of one rank",
        ),
        *((pool, {"tree": "HiRadixCache"}, None) for pool in _TRIED_POOLS_ON_GPUS[:2]),
        ("MHATokenToKVPool", {"tree": "HiRadixCache", "hicache_write_policy": "write_back"}, None),
        (
            "MLATokenToKVPool",
            {"tree": "HiRadixCache", "hicache_write_policy": "write_back"},
            "SGLang on GPUs with a HiRadixCache, hicache_write_policy=write_back and a MLATokenToKVPool: "
            "tested are those with MHATokenToKVPool",
        ),
        (
            "MHATokenToKVPool",
            {"tree": "HiRadixCache", "tp_size": 2},
            "SGLang on GPUs with a HiRadixCache and tp_size=2: tested is each by itself",
        ),
        (
            "MHATokenToKVPool",
            {"tree": "HiRadixCache", "hicache_write_policy": "write_through_selective"},
            "SGLang on GPUs with a HiRadixCache and hicache_write_policy=write_through_selective: tested are "
            "write_through, write_back",
        ),
        *((pool, {"speculative_algorithm": "EAGLE"}, None) for pool in _TRIED_POOLS_ON_GPUS[:2]),
        *((pool, {"speculative_algorithm": "STANDALONE"}, None) for pool in _TRIED_POOLS_ON_GPUS[:3]),
        ("MHATokenToKVPool", {"speculative_algorithm": "EAGLE3"}, None),
        *(
            ("MHATokenToKVPool", {"speculative_algorithm": "STANDALONE"} | other, None)
            for other in ({"tp_size": 2}, {"tree": "UnifiedRadixCache"}, {"tree": "HiRadixCache"})
        ),
        ("SWAKVPool", {"speculative_algorithm": "STANDALONE", "tree": "UnifiedRadixCache"}, None),
        ("MLATokenToKVPool", {"speculative_algorithm": "EAGLE", "tree": "HiRadixCache"}, None),
        (
            "MLATokenToKVPool",
            {"speculative_algorithm": "EAGLE", "tp_size": 2, "dp_size": 2} | _OVER_DATA,
            None,
        ),
        (
            "MHATokenToKVPool",
            {"speculative_algorithm": "DFLASH"},
            "SGLang on GPUs with speculative_algorithm=DFLASH: tested are STANDALONE, EAGLE, EAGLE3",
        ),
        (
            "MLATokenToKVPool",
            {"speculative_algorithm": "EAGLE3"},
            "SGLang on GPUs with speculative_algorithm=EAGLE3 and a MLATokenToKVPool: tested are those with "
            "MHATokenToKVPool",
        ),
        (
            "MHATokenToKVPool",
            {
                "speculative_algorithm": "STANDALONE",
                "tree": "HiRadixCache",
                "hicache_write_policy": "write_back",
            },
            "SGLang on GPUs with speculative_algorithm=STANDALONE and hicache_write_policy=write_back: "
            "tested is write_through",
        ),
        (
            "MHATokenToKVPool",
            {"speculative_algorithm": "EAGLE", "tree": "UnifiedRadixCache"},
            "SGLang on GPUs with speculative_algorithm=EAGLE, a MHATokenToKVPool and a UnifiedRadixCache: "
            "nobody has run these together",
        ),
        (
            "MHATokenToKVPool",
            {"speculative_algorithm": "STANDALONE", "tp_size": 2, "tree": "HiRadixCache"},
            "SGLang on GPUs with speculative_algorithm=STANDALONE, a MHATokenToKVPool and tp_size=2 and a "
            "HiRadixCache: nobody has run these together",
        ),
        *(
            (
                "MHATokenToKVPool",
                {"speculative_algorithm": "EAGLE", name: True},
                f"SGLang on GPUs with speculative_algorithm=EAGLE and {name}=True: tested is one model that "
                "drafts equally far each time",
            )
            for name in ("enable_multi_layer_eagle", "speculative_adaptive")
        ),
        (
            "MHATokenToKVPool",
            {"tp_size": 2, "dp_size": 2},
            "SGLang on GPUs with tp_size=2 and dp_size=2: tested is each by itself",
        ),
        (
            "MLATokenToKVPool",
            {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
            "SGLang on GPUs with tp_size=4 and enable_dp_attention=True: tested is each by itself",
        ),
        (
            "MLATokenToKVPool",
            {"dp_size": 2},
            "SGLang on GPUs with dp_size=2 and a MLATokenToKVPool: tested are those with MHATokenToKVPool",
        ),
        (
            "SWAKVPool",
            {"pp_size": 2},
            "SGLang on GPUs with pp_size=2 and a SWAKVPool: tested are those with MHATokenToKVPool",
        ),
        (
            "MHATokenToKVPool",
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "SGLang on GPUs with enable_dp_attention=True and a MHATokenToKVPool: tested are those with "
            "MLATokenToKVPool",
        ),
        (
            "HybridLinearKVPool",
            {"full": "MHATokenToKVPool", "tp_size": 2},
            "SGLang on GPUs with tp_size=2 and a HybridLinearKVPool of MHATokenToKVPool: tested are those "
            "with MHATokenToKVPool, MLATokenToKVPool, SWAKVPool",
        ),
    ],
)
def test_engines_on_gpus_that_were_not_run_are_untried(
    pool: str, given: dict[str, Any], reason: str | None
) -> None:
    plain: dict[str, Any] = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "enable_dp_attention": False}
    plain |= {
        "disaggregation_mode": "null",
        "tree": "RadixCache",
        "speculative_algorithm": None,
        "hicache_write_policy": "write_through",
    }
    arguments = SimpleNamespace(**(plain | given))
    held, tree = (type(name, (), {})() for name in (pool, arguments.tree))
    if "full" in given:
        held.full_kv_pool = type(given["full"], (), {})()
    assert untried_on_gpus(arguments, held, tree) == reason

"""Storms over every kind of model that SGLang runs on a CPU, until a million checks have found nothing.

    python -m tests.engines.sglang.real.clean_storm --output FILE [--minutes 4]

Each kind and loop has a scheduler of its own, one after another in this process; answers are compared with
those of the same storm without a canary. FILE is continued where an earlier call stopped. Exit status 1 when
anything is found, 2 when the time was over first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.engines.sglang.real import (
    deepseek_v4,
    index_keys,
    several_drafts,
    stand_ins,
    unified_memory,
)
from tests.engines.sglang.real.tiers import TIER

# Of DeepSeek-V4: each forward overwrites states of compression; they are named, and cost their share.
_EXPECTED = re.compile(r"^states of compression are not checked|of KV bytes protected, target")
_GOAL = 1_000_000
_SETTINGS: dict[str, Any] = {"max_total_tokens": 832}
_CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
_TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
_KINDS: list[tuple[str, dict[str, Any]]] = [
    *(
        (model, {"page_size": page, "disable_overlap_schedule": plain, "enable_mixed_chunk": True})
        for model, page in (("llama", 1), ("llama", 16), ("latent", 1), ("windows", 1), ("windows", 16))
        for plain in (True, False)
    ),
    ("states", {"max_mamba_cache_size": 32}),
    ("llama", TIER | {"hicache_write_policy": "write_through"}),
    ("llama", TIER | {"hicache_write_policy": "write_back", "page_size": 16}),
    ("windows", TIER | {"hicache_write_policy": "write_through", "disable_overlap_schedule": False}),
    ("latent", TIER | {"hicache_write_policy": "write_back", "page_size": 16}),
    ("llama", {"speculative_algorithm": "EAGLE", "page_size": 16, **_CHAIN}),
    ("llama", {"speculative_algorithm": "EAGLE", **_TREE}),
    ("llama", {"speculative_algorithm": "EAGLE3", **_CHAIN}),
    ("llama", {"speculative_algorithm": "STANDALONE", **_TREE}),
    ("llama", {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}),
    ("next tokens", {"speculative_algorithm": "NEXTN", **_CHAIN}),
    *(
        (
            model,
            TIER | {"hicache_write_policy": policy, "page_size": page, "speculative_algorithm": kind} | more,
        )
        for model, kind, more, policy, page in (
            ("llama", "EAGLE", _CHAIN, "write_through", 16),
            ("llama", "EAGLE", _TREE, "write_back", 1),
            ("llama", "EAGLE3", _CHAIN, "write_back", 16),
            ("llama", "STANDALONE", _TREE, "write_through", 1),
            ("llama", "NGRAM", {"speculative_num_draft_tokens": 6}, "write_back", 1),
            ("next tokens", "NEXTN", _CHAIN, "write_through", 1),
            ("next tokens", "NEXTN", _TREE, "write_back", 1),
        )
    ),
    ("index keys", {"page_size": index_keys.PAGE, "max_total_tokens": 1280, "enable_mixed_chunk": True}),
    *(
        (
            "deepseek v4",
            {
                "page_size": deepseek_v4.PAGE,
                "chunked_prefill_size": deepseek_v4.PAGE,
                "max_total_tokens": 2560,
                "enable_mixed_chunk": True,
                "disable_overlap_schedule": plain,
            },
        )
        for plain in (True, False)
    ),
    ("windows", unified_memory.SETTINGS | {"page_size": 1, "enable_mixed_chunk": True}),
    (
        "windows",
        unified_memory.SETTINGS
        | {"page_size": 16, "enable_mixed_chunk": True, "disable_overlap_schedule": False},
    ),
    ("states", unified_memory.SETTINGS | {"max_mamba_cache_size": 32}),
    *(
        (
            several_drafts.MODEL,
            {
                "speculative_algorithm": "EAGLE",
                "page_size": page,
                "disable_hybrid_swa_memory": not windows,
                "speculative_num_steps": steps,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": steps + 1,
            },
        )
        for steps, page, windows in ((2, 1, True), (3, 16, True), (3, 1, False), (2, 16, False))
    ),
]


def main() -> None:
    """Run all kinds at least once, and again with other seeds until the goal is reached."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no storm after so many")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    # Drafts ask for the interpreter; the streams are for the host tier.
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": "inproc",
        "SGLANG_SWA_EVICTION_INTERVAL": "4", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    _prepare()
    runs: list[dict[str, Any]] = (
        json.loads(given.output.read_text("utf-8"))["runs"] if given.output.exists() else []
    )
    ended = False
    with TemporaryDirectory() as folder:
        for model, settings, seed in itertools.islice(_storms(), len(runs), None):
            ended = sum(run["checks"] for run in runs) >= _GOAL and len(runs) % len(_KINDS) == 0
            if ended or time.monotonic() > deadline:
                break
            runs.append(_storm(Path(folder), model, settings, seed))
            print(json.dumps(runs[-1]), flush=True)
            given.output.write_text(json.dumps(_result(runs), indent=1) + "\n", "utf-8")
    bad = [run for run in runs if run["violations"] or not run["same_answers"] or run["unexpected"]]
    sys.exit(1 if bad else 0 if ended else 2)


def _storms() -> Iterator[tuple[str, dict[str, Any], int]]:
    for seed in itertools.count(3):
        for model, settings in _KINDS:
            yield model, settings, seed


def _prepare() -> None:
    from tests.engines.sglang.real import drafting, host_memory, streams

    streams.install()
    stand_ins.install()
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    # SGLang's own switch: every 16th batch takes requests back, as if memory were short.
    vars(scheduler).update(TEST_RETRACT=True, TEST_RETRACT_INTERVAL=16)
    host_memory.install()
    drafting.install()
    load_plugins()


def _result(runs: list[dict[str, Any]]) -> dict[str, Any]:
    from canary_obs.bench.environment import environment

    return {
        "what": "clean storms on a real SGLang", "environment": environment(),
        "checks": sum(run["checks"] for run in runs), "violations": sum(run["violations"] for run in runs),
        "same_answers": all(run["same_answers"] for run in runs),
        "unexpected": [reason for run in runs for reason in run["unexpected"]], "runs": runs,
    }  # fmt: skip


def _storm(folder: Path, model: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        base = model
        if settings.get("enable_unified_memory"):
            unified_memory.install(patch)
        if model == "index keys":
            index_keys.add_index_keys(patch.setattr)
            base = "latent"
        elif model == "deepseek v4":
            deepseek_v4.add_pools(patch.setattr)
            base = "windows"
        return _ran(folder, base, settings, seed) | {"model": model}


def _ran(folder: Path, model: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    from tests.engines.sglang.real.models import make_draft, make_model
    from tests.engines.sglang.real.rig import Rig
    from tests.engines.sglang.real.traffic import storm

    given, target = _SETTINGS | settings, make_model(folder, model)
    algorithm = str(settings.get("speculative_algorithm"))
    if algorithm.startswith("EAGLE") and model != several_drafts.MODEL:
        given["speculative_draft_model_path"] = str(make_draft(folder, algorithm.lower()))
    elif algorithm in ("EAGLE", "STANDALONE", "NEXTN"):
        given["speculative_draft_model_path"] = str(target)
    os.environ["KV_CANARY_MODE"] = "log"
    rig = Rig(target, **given)
    rig.run(storm(rig, seed=seed))
    found = rig.settle()
    counters = [rig.counters(group.name) for group in rig.adapter.groups]
    state, reasons = rig.canary.verdict()
    rig.close()
    os.environ["KV_CANARY_MODE"] = "none"
    plain = Rig(target, **given)
    plain.run(storm(plain, seed=seed))
    told = [reason for reason in reasons if not _EXPECTED.search(reason)]
    return {
        "model": model, "settings": settings, "seed": seed,
        "checks": sum(sum(each.verified.values()) + sum(each.hashed.values()) for each in counters),
        "violations": len(found), "state": [state.value, *reasons], "unexpected": told,
        "same_answers": plain.answers == rig.answers, "requests": len(rig.answers),
    }  # fmt: skip


if __name__ == "__main__":
    main()

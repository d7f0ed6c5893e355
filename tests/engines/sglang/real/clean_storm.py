"""Storms over every kind of model that SGLang runs on a CPU, until a million checks have found nothing.

    python -m tests.engines.sglang.real.clean_storm --output FILE

Each kind and loop has a scheduler of its own, one after another in this process; answers are compared with
those of the same storm without a canary. Exit status 1 when anything is found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.engines.sglang.real import stand_ins

_GOAL = 1_000_000
_SETTINGS: dict[str, Any] = {"max_total_tokens": 832, "enable_mixed_chunk": True}
_KINDS: list[tuple[str, dict[str, Any]]] = [
    (model, {"page_size": page, "disable_overlap_schedule": plain})
    for model, page in (("llama", 1), ("llama", 16), ("latent", 1), ("windows", 1), ("windows", 16))
    for plain in (True, False)
] + [("states", {"max_mamba_cache_size": 32, "enable_mixed_chunk": False, "disable_overlap_schedule": True})]


def main() -> None:
    """Run all kinds at least once, and again with other seeds until the goal is reached."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "KV_CANARY_MODE": "log", "KV_CANARY_ENDPOINT": "inproc",
        "SGLANG_SWA_EVICTION_INTERVAL": "4",
    }  # fmt: skip
    stand_ins.install()
    from sglang.srt.plugins import load_plugins

    from canary_obs.bench.environment import environment

    load_plugins()
    runs, checks = list[dict[str, Any]](), 0
    with TemporaryDirectory() as folder:
        for seed in itertools.count(3):
            for model, settings in _KINDS:
                run = _storm(Path(folder), model, settings, seed)
                runs.append(run)
                checks += run["checks"]
                print(json.dumps(run), flush=True)
            if checks >= _GOAL:
                break
    bad = [run for run in runs if run["violations"] or not run["same_answers"] or run["unexpected"]]
    result = {
        "what": "clean storms on a real SGLang", "environment": environment(), "checks": checks,
        "violations": sum(run["violations"] for run in runs), "runs": runs,
    }  # fmt: skip
    output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    sys.exit(1 if bad else 0)


def _storm(folder: Path, model: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    from tests.engines.sglang.real.models import make_model
    from tests.engines.sglang.real.rig import Rig
    from tests.engines.sglang.real.traffic import storm

    given = _SETTINGS | settings
    os.environ["KV_CANARY_MODE"] = "log"
    rig = Rig(make_model(folder, model), **given)
    rig.run(storm(rig, seed=seed))
    found = rig.settle()
    counters = [rig.counters(group.name) for group in rig.adapter.groups]
    state, reasons = rig.canary.verdict()
    rig.close()
    os.environ["KV_CANARY_MODE"] = "none"
    plain = Rig(make_model(folder, model), **given)
    plain.run(storm(plain, seed=seed))
    told = [reason for reason in reasons if "linear attention" not in reason and "of KV bytes" not in reason]
    return {
        "model": model, "settings": settings, "seed": seed,
        "checks": sum(sum(each.verified.values()) + sum(each.hashed.values()) for each in counters),
        "violations": len(found), "state": [state.value, *reasons], "unexpected": told,
        "same_answers": plain.answers == rig.answers, "requests": len(rig.answers),
    }  # fmt: skip


if __name__ == "__main__":
    main()

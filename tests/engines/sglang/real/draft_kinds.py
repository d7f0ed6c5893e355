"""Engine settings of every kind of speculation that runs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.sglang.real import several_drafts
from tests.engines.sglang.real.models import make_draft

_STEPS = {"speculative_num_steps": 3}
_CHAIN = _STEPS | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
_SHORT_CHAIN = {
    "speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3
}  # fmt: skip
_TREE = _STEPS | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
_NGRAM = {
    "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6,
    "speculative_ngram_capacity": 100_000,  # the default keeps 1.7 GB for as long as the process lives
}  # fmt: skip
# Three drafted tokens at first; after each batch as many as were accepted suggest, none and one among them.
_ADAPTED = {"1": {"candidate_steps": [0, 1, 3]}, "warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "adaptive eagle": {
        "speculative_algorithm": "EAGLE",
        "speculative_adaptive": True,
        "page_size": 16,
        **_CHAIN,
    },
    "standalone": {"speculative_algorithm": "STANDALONE", **_CHAIN},
    "eagle tree": {"speculative_algorithm": "EAGLE", **_TREE},
    "eagle": {"speculative_algorithm": "EAGLE", **_CHAIN},
    "eagle3": {"speculative_algorithm": "EAGLE3", **_CHAIN},
    "standalone tree": {"speculative_algorithm": "STANDALONE", **_TREE},
    "n-grams": _NGRAM,
    "mtp": {"speculative_algorithm": "NEXTN", **_CHAIN},
    "mtp tree": {"speculative_algorithm": "NEXTN", **_TREE},
}
# Several draft models, with windows as the target has them, and in pools without.
SEVERAL: dict[str, dict[str, Any]] = {
    "several drafts": {"speculative_algorithm": "EAGLE", "page_size": 16, **_CHAIN},
    "several drafts without windows": {
        "speculative_algorithm": "EAGLE",
        "disable_hybrid_swa_memory": True,
        **_SHORT_CHAIN,
    },
}


def model_of_kind(kind: str) -> str:
    """What drafts for itself has a model of its own."""
    if kind.startswith(several_drafts.MODEL):
        return several_drafts.MODEL
    return "next tokens" if kind.startswith("mtp") else "llama"


def settings_of_kind(kind: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """What a scheduler with this kind of speculation is given, its draft model's path among it."""
    settings = dict((KINDS | SEVERAL)[kind])
    algorithm = settings["speculative_algorithm"]
    if algorithm == "NEXTN" or model_of_kind(kind) == several_drafts.MODEL:
        settings["speculative_draft_model_path"] = str(models(model_of_kind(kind)))
    elif algorithm != "NGRAM":
        root = models("llama").parent
        draft = root / "llama" if algorithm == "STANDALONE" else make_draft(root, algorithm.lower())
        settings["speculative_draft_model_path"] = str(draft)
    if settings.get("speculative_adaptive"):
        chosen = folder / "steps.json"
        chosen.write_text(json.dumps(_ADAPTED), "utf-8")
        settings["speculative_adaptive_config"] = str(chosen)
    return settings

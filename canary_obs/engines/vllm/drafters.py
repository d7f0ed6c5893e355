"""What is known about vLLM's drafters: which layers they write, and when."""

from __future__ import annotations

from typing import Any

# Drafters of both model runners; EAGLE's also run EAGLE-3 heads and MTP layers. They write the slots of the
# target's tokens and of as many tokens after them as they propose, all before `sample_tokens` returns.
# Version 0.31 renames V2's drafter for a draft model.
KNOWN_DRAFTERS = frozenset(
    {
        "DraftModelProposer",
        "EagleProposer",
        "EagleSpeculator",
        "MTPSpeculator",
        "PlainDraftModelSpeculator",
        "StandaloneARSpeculator",
    }
)


def drafter_is_known(runner: Any) -> bool:
    """Whether it is known which slots drafting writes, and when."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    parallel = getattr(runner.speculative_config, "parallel_drafting", False)
    return type(drafter).__name__ in KNOWN_DRAFTERS and not parallel


def draft_layers(runner: Any) -> frozenset[str]:
    """Names of a draft model's layers, which are written after the target's forward."""
    for owner, name in (("drafter", "_draft_attn_layer_names"), ("speculator", "draft_attn_layer_names")):
        if names := getattr(getattr(runner, owner, None), name, None):
            return frozenset(names)
    return frozenset()


def drafted_tokens(runner: Any) -> int:
    """Most tokens that drafting proposes per step, so how many slots after the target's it may write."""
    return int(runner.speculative_config.num_speculative_tokens)

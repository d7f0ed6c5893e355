"""Keep a target's forward for its draft model, and find the slots that drafting may write."""

from canary_kernels.drafts.op import AttentionMetadata, DraftMemory, TargetStep, keep_target

__all__ = ["AttentionMetadata", "DraftMemory", "TargetStep", "keep_target"]

"""Keep a target's forward for its draft model, and find the slots that drafting may write."""

from canary_kernels.drafts.op import keep_target
from canary_kernels.drafts.steps import DraftMemory, DraftReserve, TargetStep

__all__ = ["DraftMemory", "DraftReserve", "TargetStep", "keep_target"]

"""Fingerprint the KV bytes of slots over all layers: store, compare, locate."""

from canary_kernels.fingerprint.locate import Suspect, WordChange, locate, suspects
from canary_kernels.fingerprint.op import (
    baseline_range,
    baseline_slots,
    compare_range,
    compare_slots,
    complete_slots,
    hash_slots,
    range_comparison,
)
from canary_kernels.fingerprint.plan import FingerprintPlan, layer_plans, plan_fingerprint

__all__ = [
    "FingerprintPlan",
    "Suspect",
    "WordChange",
    "baseline_range",
    "baseline_slots",
    "compare_range",
    "compare_slots",
    "complete_slots",
    "hash_slots",
    "layer_plans",
    "locate",
    "plan_fingerprint",
    "range_comparison",
    "suspects",
]

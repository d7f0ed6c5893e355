"""What the counters say of all sweeps so far, over all groups."""

from __future__ import annotations

from torch import Tensor

from canary_kernels import layout
from canary_obs.vocabulary import Cause

COUNTED_CAUSES = tuple(Cause)[: layout.NUM_UNVERIFIED]  # those that kernels count


def sweep_totals(counters: Tensor | None) -> dict[str, int]:
    """Slots by cause, `violations`, `checked`, `comparable` and `compared`.

    counters: int64 [groups * COUNTER_WORDS] on the host; None = all are 0.
    """
    if counters is None:
        totals = [0] * layout.COUNTER_WORDS
    else:
        totals = counters.view(-1, layout.COUNTER_WORDS).sum(0).tolist()
    phase = layout.Phase.SWEEP
    lanes = layout.COUNT_VIOLATIONS + phase * layout.NUM_REASONS
    unverified = layout.COUNT_UNVERIFIED + phase * layout.NUM_UNVERIFIED
    counts = {cause.value: totals[unverified + cause.code] for cause in COUNTED_CAUSES}
    counts["violations"] = sum(totals[lanes : lanes + layout.NUM_REASONS])
    found_wanting = totals[lanes + layout.Reason.UNWRITTEN] + totals[lanes + layout.Reason.RECORD]
    counts["checked"] = totals[layout.COUNT_VERIFIED + phase] + found_wanting
    # The kernel that reads records found so many whose bytes must be compared.
    counts["comparable"] = totals[layout.COUNT_VERIFIED + phase] + counts["baseline"]
    counts["compared"] = totals[layout.COUNT_HASHED + phase] + counts["no_fingerprint"]
    return counts

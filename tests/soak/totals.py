"""What the reports of a soak come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from tests.soak.instrumented import KindReport


def totals(reports: Iterable[KindReport]) -> dict[str, object]:
    """Sums, with the upper 95 % confidence bound on the rate of false alarms (rule of three)."""
    reports = list(reports)
    checks = sum(one.records_checked + one.bytes_checked for one in reports)
    return {
        "slot_checks": checks,
        "records_checked": sum(one.records_checked for one in reports),
        "bytes_checked": sum(one.bytes_checked for one in reports),
        "false_alarms": sum(one.violations for one in reports),
        "upper_bound_95": 3 / checks,
        "seconds": round(sum(one.seconds for one in reports), 1),
        "kinds": [asdict(one) for one in reports],
    }

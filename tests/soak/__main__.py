"""False-alarm soak over every kind of model: python -m tests.soak --checks 100000000 --output soak.json.

Traffic with abort storms and random eviction pressure on the CPU, sweeps and patrol beside it, no fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.soak.instrumented import KindReport
from tests.soak.kinds import KINDS, soak
from tests.soak.totals import totals


def main() -> int:
    """Exit code 1 when anything was reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=2_000_000, help="records to check, over all kinds")
    parser.add_argument("--model", choices=sorted(KINDS), action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kinds = options.model or list(KINDS)
    reports: list[KindReport] = []
    for kind in kinds:
        found = soak(kind, options.checks // len(kinds), options.seed)
        for one in found:
            print(json.dumps(asdict(one)), flush=True)
        reports += found
    total = totals(reports)
    print(json.dumps({name: value for name, value in total.items() if name != "kinds"}))
    if options.output:
        options.output.write_text(json.dumps(total, indent=1) + "\n")
    return int(any(one.violations or one.observer_faults for one in reports))


if __name__ == "__main__":
    sys.exit(main())

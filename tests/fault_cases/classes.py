"""The console's list of likely causes out of the fault cases: `python -m tests.fault_cases.classes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fault_cases.table import collected
from tests.fault_cases.transfers import TRANSFERS

FILE = Path(__file__).parents[2] / "canary_obs/service/fault_classes.json"


def classes() -> list[dict[str, Any]]:
    """Every class that is caught, in the order of the documents."""
    caught = [case for case in collected().values() if not case.missed]
    caught.sort(key=lambda case: (case.place, case.title))
    rows = [(case, case.place) for case in caught] + [(case, "transfer") for case in TRANSFERS]
    fields = ("title", "story", "finds", "reports")
    return [{name: getattr(case, name) for name in fields} | {"place": place} for case, place in rows]


def text() -> str:
    """The file."""
    return json.dumps(classes(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

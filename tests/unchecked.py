"""Ways in which a check can silently not run, as shown by tests, and their table in docs/architecture.md.

A test that takes a check away and sees the state leave `ok` reports it through the fixture `unchecked`:

    def test_hooks_that_never_reach_the_canary(unchecked):
        ...
        unchecked("forward hooks never reach the canary", "vLLM V1", canary.verdict(),
                  names="forwards were not shown", seconds=elapsed)

`UPDATE_UNCHECKED=1 pytest ...` writes what was seen to tests/unchecked_ways; without it, what is written
there must agree. `python -m tests.unchecked` puts the table into docs/architecture.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

FOLDER = Path(__file__).parent / "unchecked_ways"
PAGE = Path(__file__).parents[1] / "docs/architecture.md"
ENGINES = ("reference", "vLLM V1", "vLLM V2", "SGLang")
LIMIT_SECONDS = 10.0
_OF_FAULTS = ("every slot is adopted after a fault",)  # ways that a fault of the canary is a part of
_MARKS = "<!-- unchecked ways: begin -->\n", "<!-- unchecked ways: end -->\n"


class Report(Protocol):
    """The fixture."""

    def __call__(
        self, way: str, engine: str, verdict: tuple[str, Sequence[str]], *, names: str, seconds: float
    ) -> None:
        """Assert that a way of not checking left `ok` in time, for a reason that names it, and record it.

        verdict: (state, reasons) of the rank or of the service, seen `seconds` after the check went missing.
        names: a part of the reason without numbers.
        """


@pytest.fixture
def unchecked(request: pytest.FixtureRequest) -> Report:
    """Reports one way in which a check can silently not run."""
    test = request.node.nodeid.replace("::", ":").split("[")[0]

    def report(
        way: str, engine: str, verdict: tuple[str, Sequence[str]], *, names: str, seconds: float
    ) -> None:
        state, reasons = str(verdict[0]), verdict[1]
        assert engine in ENGINES, f"{engine!r} is not one of {ENGINES}"
        assert state in ("degraded", "blind", "violated"), f"{way}: the state is {state!r}"
        assert any(names in reason for reason in reasons), f"{way}: {names!r} is in none of {reasons}"
        faults = [reason for reason in reasons if "observer failed" in reason and names not in reason]
        assert not faults or way in _OF_FAULTS, (
            f"{way}: what takes the check away has failed itself: {faults}"
        )
        assert seconds <= LIMIT_SECONDS, f"{way}: noticed after {seconds:.1f} s"
        seen = {"way": way, "engine": engine, "state": state, "reason": names, "test": test}
        path = FOLDER / (re.sub(r"[^a-z0-9]+", "-", f"{engine} {way}".lower()).strip("-") + ".json")
        if os.environ.get("UPDATE_UNCHECKED"):
            text = json.dumps(seen | {"seconds": round(seconds, 1)}, indent=1)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.exists(), f"run this test once with UPDATE_UNCHECKED=1 and commit {path}"
        committed = json.loads(path.read_text(encoding="utf-8"))
        assert seen == {key: value for key, value in committed.items() if key != "seconds"}

    return report


def recorded() -> list[dict[str, str | float]]:
    """All records, by way and engine."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]
    return sorted(records, key=lambda record: (record["way"], record["engine"]))


def table() -> str:
    """The Markdown table, between its marks."""
    lines = [
        "| what is not checked | engine | state | reason | seconds | test |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['way']} | {r['engine']} | `{r['state']}` | {r['reason']} | {r['seconds']} "
            f"| `{str(r['test']).removeprefix('tests/')}` |"
            for r in recorded()
        ),
    ]
    return _MARKS[0] + "\n".join(lines) + "\n" + _MARKS[1]


def page_with_table(page: str) -> str:
    """docs/architecture.md with the table of now."""
    before, after = page.index(_MARKS[0]), page.index(_MARKS[1]) + len(_MARKS[1])
    return page[:before] + table() + page[after:]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

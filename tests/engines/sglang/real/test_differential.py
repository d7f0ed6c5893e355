"""What SGLang's own canary reports, ours reports, on one engine; docs/sglang.md has the whole table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.engines.sglang.real.differential import BEGIN, END, Outcome

_ROOT = Path(__file__).parents[4]
# One of each kind; the command that docs/sglang.md names runs them all.
_FAULTS = (
    "two table entries swapped", "position + 1, one request", "a bit of K in layer 0",
    "a bit of V in layer 2", "no window slot",
)  # fmt: skip


def test_ours_reports_what_sglangs_own_canary_does(tmp_path: Path) -> None:
    """In a process of its own: Triton's interpreter and the stand-ins for streams last for the process."""
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang.real.differential"]
    done = subprocess.run(
        [*command, "--json", str(outcomes), *_FAULTS], cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    found = msgspec.json.decode(outcomes.read_bytes(), type=list[Outcome])
    assert {outcome.name for outcome in found} == set(_FAULTS)
    for outcome in found:
        assert outcome.ours, outcome
        assert bool(outcome.with_all) is (outcome.name not in _FAULTS[3:]), outcome
        # The published table says the same.
        assert outcome.row() in _published()


def test_the_published_table_has_every_fault() -> None:
    names = [row.split("|")[1].strip() for row in _published().splitlines()[2:]]
    assert len(names) >= 20
    assert len(set(names)) == len(names)
    assert set(_FAULTS) <= set(names)


def _published() -> str:
    text = (_ROOT / "docs/sglang.md").read_text("utf-8")
    return text.split(BEGIN)[1].split(END)[0]

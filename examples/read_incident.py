"""Read a saved incident: `python examples/read_incident.py incident.json`. Needs no service, no torch.

`curl HOST:9464/canary/incidents/ID > incident.json` saves one; `canary-obs incident show FILE` prints more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from canary_obs.telemetry.incident_bundle import read_bundle


def main(path: Path) -> None:
    """Print what was found, which word changed, and who used the slot."""
    incident = read_bundle(path).incident
    noun = "violation" if incident.violations == 1 else "violations"
    print(f"{incident.id}: {incident.violations} {noun} on {incident.engine}/{incident.instance}")
    for event in incident.first:
        row = event.violation
        print(f"  {row.reason} found by {row.phase} in step {row.step}: group {row.group}, slot {row.slot}")
    for evidence in incident.evidence:
        print(f"  slot {evidence.slot.slot}, now used by {', '.join(evidence.holders) or 'no request'}:")
        for word in evidence.changed:
            place = f"{word.part}, layer {word.layer}, head {word.head}, element {word.element}"
            print(f"    {place} was {word.original}, is {word.current}")
        for past in evidence.history:
            print(f"    {past.kind} in step {past.step} by {', '.join(past.requests)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

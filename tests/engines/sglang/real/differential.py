"""Both canaries on one engine, SGLang's own and ours: what each of them says of the same faults.

`python -m tests.engines.sglang.real.differential [--write DOCUMENT] [--json FILE] [FAULT ...]` runs those of
`faults.py`, or those named, and prints a table. Exit status 1: SGLang's canary reports what ours does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.engines.sglang.real import stand_ins, streams

Named = list[tuple[str, str]]  # reason and group, once each
BEGIN, END = "<!-- differential: begin -->\n", "<!-- differential: end -->\n"
HEAD = "| fault | SGLang's, as shipped | SGLang's, with V and tokens | canary_obs |\n|---|---|---|---|\n"


class Outcome(msgspec.Struct, kw_only=True):
    """What the two say of one fault. Reasons by their own names, by group; None = that engine is refused."""

    name: str
    as_shipped: list[tuple[str, str]] | None
    with_all: list[tuple[str, str]] | None
    ours: list[tuple[str, str]]
    unnamed: list[int]  # slots that SGLang's canary names and ours does not

    def row(self) -> str:
        """As a row of the table."""
        return f"| {self.name} | {_cell(self.as_shipped)} | {_cell(self.with_all)} | {_cell(self.ours)} |\n"

    def disagrees(self) -> bool:
        """Whether ours is silent where SGLang's is not."""
        theirs = {group for found in (self.as_shipped, self.with_all) for _, group in found or ()}
        return not theirs <= {group for _, group in self.ours} or bool(self.unnamed)


def _cell(found: Sequence[tuple[str, str]] | None) -> str:
    if found is None:
        return "refuses the model"
    return ", ".join(sorted({f"`{reason}`" for reason, _ in found})) or "**nothing**"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="where to replace the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the outcomes")
    given = parser.parse_args()
    # The interpreter and the streams last for the process.
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", KV_CANARY_ENDPOINT="inproc")
    os.environ.update(KV_CANARY_MODE="log")
    stand_ins.install()
    streams.install()
    from sglang.srt.plugins import load_plugins

    from tests.engines.sglang.real.faults import FAULTS

    load_plugins()
    chosen = [fault for fault in FAULTS if not given.faults or _name(fault) in given.faults]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in chosen:
            outcomes.append(_try(Path(folder), fault))
            print(outcomes[-1].row(), end="", flush=True)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(outcomes))
    if given.write is not None:
        _replace(given.write, HEAD + "".join(outcome.row() for outcome in outcomes))
    wrong = [outcome for outcome in outcomes if outcome.disagrees()]
    for outcome in wrong:
        print(f"ours is silent: {json.dumps(msgspec.to_builtins(outcome))}", file=sys.stderr)
    sys.stdout.flush()
    return 1 if wrong or not chosen else 0


def _name(fault: Any) -> str:
    name: str = fault.name
    return f"MLA: {name}" if fault.model == "latent" else name


def _replace(document: Path, table: str) -> None:
    text = document.read_text("utf-8")
    before, rest = text.split(BEGIN)
    document.write_text(f"{before}{BEGIN}{table}{END}{rest.split(END)[1]}", "utf-8")


def _try(folder: Path, fault: Any) -> Outcome:
    from tests.engines.sglang.real import sglang_canary

    for name in sglang_canary.MORE:
        os.environ.pop(name, None)
    as_shipped, _, _ = _both(folder, fault)
    os.environ.update(sglang_canary.MORE)
    theirs, ours, unnamed = _both(folder, fault)
    return Outcome(
        name=_name(fault), as_shipped=as_shipped,
        with_all=theirs, ours=ours, unnamed=unnamed if fault.same_slots else [],
    )  # fmt: skip


def _both(folder: Path, fault: Any) -> tuple[list[tuple[str, str]] | None, list[tuple[str, str]], list[int]]:
    """One run: reasons and groups of theirs and of ours, and slots that only theirs names."""
    from tests.engines.sglang.real.faults import serve_with
    from tests.engines.sglang.real.models import make_model
    from tests.engines.sglang.real.rig import Rig
    from tests.engines.sglang.real.sglang_canary import SETTINGS, OwnLog

    model, settings, refused = make_model(folder, fault.model), SETTINGS | fault.settings, False
    try:
        rig = Rig(model, **settings)
    except NotImplementedError:
        refused = True
        rig = Rig(model, **(settings | {"kv_canary": "none", "kv_canary_sweep_interval": 0}))
    with OwnLog() as own:
        serve_with(fault, rig, own)
        rig.settle()
    rig.close()
    theirs, ours, unnamed = compared(own.lines, rig.found)
    return None if refused else theirs, ours, unnamed


def compared(theirs: Sequence[Any], ours: Sequence[Any]) -> tuple[Named, Named, list[int]]:
    """Reasons and groups of lines of SGLang's canary and of our violations; slots that only theirs names."""
    unnamed = {
        line.slot
        for line in theirs
        if not any(
            item.group == line.group and item.slot <= line.slot < item.slot + item.slots for item in ours
        )
    }
    return (
        sorted({(line.reason, line.group) for line in theirs}),
        sorted({(item.reason.value, item.group) for item in ours}),
        sorted(unnamed),
    )


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # schedulers leave threads behind

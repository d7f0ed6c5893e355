"""The commands of the runbooks, as a person who is paged copies them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from alerts.render import RUNBOOKS

_BLOCK = re.compile(
    r"^```sh(?P<kind> \w+)?\n(?P<script>.*?)^```\n"
    r"(?:\nprints \(`...` stands for anything\)\n\n```text\n(?P<prints>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A block of a runbook; `prints` is empty where the runbook promises no output."""

    runbook: str
    kind: str  # "" = shell on any machine; "vllm" = needs a vLLM server; "kubernetes" = needs a cluster
    script: str
    prints: str

    def promises(self, output: str) -> bool:
        """Whether the output begins with what the runbook says; further lines may follow."""
        wanted = re.escape(self.prints.strip()).replace(re.escape("..."), ".*?")
        return re.fullmatch(f"{wanted}( *\n.*)?", output.strip(), re.DOTALL) is not None


def commands() -> Iterator[Command]:
    """Every block of every runbook."""
    for path in sorted(RUNBOOKS.glob("*.md")):
        for block in _BLOCK.finditer(path.read_text("utf-8")):
            kind = "kubernetes" if "kubectl" in block["script"] else (block["kind"] or "").strip()
            yield Command(runbook=path.stem, kind=kind, script=block["script"], prints=block["prints"] or "")


def of_kind(kind: str) -> list[Command]:
    """The blocks of a kind, each once: several runbooks have the same."""
    return list({command.script: command for command in commands() if command.kind == kind}.values())

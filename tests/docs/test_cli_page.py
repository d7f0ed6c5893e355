"""docs/cli.md has every command and option of the program, as `--help` has them.

`UPDATE_CLI=1 pytest tests/docs/test_cli_page.py` rewrites the reference; review the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from canary_obs.cli import app
from canary_obs.cli.exit_codes import ExitCode

PAGE = Path(__file__).parents[2] / "docs/cli.md"
BEGIN, END = "<!-- reference: begin -->\n", "<!-- reference: end -->\n"


def commands_of(command: Any, name: str = "canary-obs") -> Iterator[tuple[str, Any]]:
    for word, inner in getattr(command, "commands", {}).items():
        yield f"{name} {word}", inner
        yield from commands_of(inner, f"{name} {word}")


def reference() -> str:
    program: Any = typer.main.get_command(app)
    parts = []
    for name, command in commands_of(program):
        if name.startswith("canary-obs bench"):
            continue  # docs/performance.md
        rows = [row_of(parameter) for parameter in command.params if parameter.name != "help"]
        words = " ".join((command.help or "").split())
        table = "| | |\n|---|---|\n" + "".join(rows) + "\n" if rows else ""
        parts.append(f"### `{name}`\n\n{words}\n\n{table}")
    return "\n" + "".join(parts)


def row_of(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts if name.startswith("-"))
    shown = names or f"`{parameter.metavar or parameter.name.upper()}`"
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {shown} | {text} |\n"


def test_the_reference_is_the_program_s_own() -> None:
    page = PAGE.read_text("utf-8")
    if os.environ.get("UPDATE_CLI"):
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + reference() + END + rest.split(END)[1], "utf-8")
        pytest.skip("the page was written")
    assert page.split(BEGIN)[1].split(END)[0] == reference()


def test_the_exit_codes_are_those_of_the_program() -> None:
    rows = dict(re.findall(r"^\| `(\d)` \| (\w+)", PAGE.read_text("utf-8"), re.MULTILINE))
    assert {int(code): name for code, name in rows.items()} == {
        code.value: code.name.lower() for code in ExitCode
    }

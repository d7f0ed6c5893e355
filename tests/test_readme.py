"""README's ten lines do what they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from canary_obs.errors import KVCacheViolation

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_lines_end_in_a_caught_violation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with pytest.raises(KVCacheViolation, match=r"reason=kv_data.*part=k, slot=7"):
        exec(compile(code, str(README), "exec"), {})


def test_every_command_line_option_in_the_readme_exists() -> None:
    from typer.testing import CliRunner

    from canary_obs.cli import app

    for command, options in re.findall(
        r"canary-obs (\w+)((?: --[a-z]+\S*(?: [^-\s]\S*)?)*)", README.read_text()
    ):
        helped = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert helped.exit_code == 0, command
        for option in re.findall(r"--[a-z]+", options):
            assert option in helped.output

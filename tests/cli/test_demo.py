"""`canary-obs demo`: what goes to standard output, and what does not."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from canary_obs.cli import app

TINY = ("demo", "--shape", "tiny", "--device", "cpu", "--steps", "20")


def test_json_is_the_only_line_on_standard_output() -> None:
    done = CliRunner().invoke(app, [*TINY, "--json"])
    assert done.exit_code == 0
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["steps"] == 20
    assert "canary attached" in done.stderr
    assert "building a small engine" in done.stderr
    assert "running for" not in done.stderr, "lines that move are for terminals"


def test_a_summary_to_read_ends_with_the_settings() -> None:
    done = CliRunner().invoke(app, TINY)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("canary attached")
    assert lines[1].split() == ["steps", "20"]
    assert "'endpoint': 'inproc'" in lines[-1]

"""Every command that asks a service, against a live engine: what a person on call would do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from canary_obs.cli import run

SECONDS = 60.0
Captured = Callable[[], Any]


class CommandLine:
    """`canary-obs` in this process; the service and the token are in the environment."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __call__(self, line: str, code: int = 0) -> str:
        """What a command prints. It must end with this exit code."""
        self._captured()
        found = run(line.split())
        printed = self._captured()
        assert found == code, (line, found, printed.out, printed.err)
        return str(printed.out)

    def json(self, line: str, code: int = 0) -> Any:
        """The JSON that it prints."""
        return json.loads(self(f"{line} --json", code))

    def until(self, line: str, code: int) -> None:
        """Repeat a command until it ends with this exit code."""
        deadline = time.monotonic() + SECONDS
        while (found := run(line.split())) != code:
            assert time.monotonic() < deadline, (line, found, self._captured())
            time.sleep(0.1)


def operate_while_all_is_well(cli: CommandLine, ranks: int, inject_token_file: str) -> None:
    """Sweeps and their life, pausing and resuming, a drill; afterwards all is well again."""
    cli.until("status", 0)
    assert f"{ranks} ok" in cli("status")
    assert "passed" in cli("sweep --wait")
    assert "passed" in cli("sweeps")
    assert f"paused: {ranks} ranks" in cli("pause")
    cli.until("status", 5)
    waiting = cli.json("sweep")["id"]
    cli(f"sweeps pause {waiting}")
    assert "paused" in cli("sweeps")
    cli(f"sweeps resume {waiting}")
    assert cli.json(f"sweeps show {waiting}")["paused"] is False
    cli(f"sweeps cancel {waiting}")
    assert f"resumed: {ranks} ranks" in cli("resume")
    cli.until("status", 0)
    cancelled = cli.json(f"sweeps show {waiting}")
    assert {part["status"] for part in cancelled["ranks"]} == {"cancelled"}
    assert "detected" in cli(f"drill --token-file {inject_token_file}")
    assert cli.json("violations")["violations"] == []
    # That a fault is going to be injected is told; which rules are loaded nobody was asked.
    told = {each["topic"]: each["grade"] for each in cli.json("doctor", 5) if each["grade"] != "fine"}
    assert told == {"faults": "warning", "alerts": "unknown"}
    cli("watch --seconds 0.5")
    assert cli.json("tainted")["tainted"] == []
    policies = [each["status"]["policy"] for each in cli.json("heal")["ranks"]]
    assert policies == ["off"] * ranks
    assert "sent to: " in cli("heal --policy dry_run")
    cli("heal --policy off")


def operate_on_an_incident(cli: CommandLine) -> None:
    """Find it, read it, acknowledge it, take that back, and acknowledge it again."""
    cli.until("status", 3)
    (incident,) = {each["id"] for each in cli.json("incidents")["incidents"]}
    assert incident in cli("incidents")
    assert "kv_data" in cli("violations")
    shown = cli(f"incident show {incident}")
    assert "kv_data" in shown
    assert {each["incident"] for each in cli.json("tainted")["tainted"]} == {incident}
    assert incident in cli("tainted")
    cli(f"ack {incident} -m planted")
    cli.until("status", 0)
    cli(f"ack {incident} --undo")
    cli.until("status", 3)
    cli("watch --seconds 0.5", 3)
    cli(f"ack {incident} -m planted")
    cli.until("status", 0)

"""Compares a result with an earlier one: what got worse, and what is no longer measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canary_obs.bench.result import BenchResult, Measure
from canary_obs.errors import ConfigurationError

COMMITTED = Path(__file__).parents[2] / "tests" / "bench" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a result differs from an earlier one."""

    worse: tuple[str, ...]  # a sentence each
    better: tuple[str, ...]
    not_measured: tuple[str, ...]  # measures that only the earlier result has
    compared: int  # measures that both have


def compare(result: BenchResult, earlier: dict[str, Any]) -> Comparison:
    """Compare measures that both have; differences within the noise of both together are none."""
    found: dict[bool, list[str]] = {True: [], False: []}
    then = earlier["measures"]
    common = [name for name in result.measures if name in then]
    for name in common:
        now = result.measures[name]
        before = Measure(**{key: value for key, value in then[name].items() if key != "met"})
        difference = now.worse_by(before.value)
        if abs(difference) > now.noise + before.noise:
            goal = "" if now.goal is None else f", the goal is {now.goal:g}"
            noise = f"noise {now.noise + before.noise:.2g}"
            then_at = f"{before.value:.4g} at {earlier['environment']['commit']}"
            sentence = f"{name}: {then_at}, now {now.value:.4g} ({noise}{goal})"
            found[difference > 0].append(sentence)
    return Comparison(
        worse=tuple(found[True]),
        better=tuple(found[False]),
        not_measured=tuple(name for name in then if name not in result.measures),
        compared=len(common),
    )


def latest_of_its_kind(result: BenchResult, folder: Path = COMMITTED) -> tuple[Path, dict[str, Any]] | None:
    """The newest result in `folder` of the same bench, device, plan and engine; None = there is none.

    Of a file under version control the committed version: this run may have overwritten it already.
    """
    wanted, own = _setting(result.to_json()), result.environment["time"]
    alike = [
        (path, earlier)
        for path, earlier in _results(folder)
        if _setting(earlier) == wanted and earlier["environment"]["time"] != own
    ]
    return max(alike, key=lambda found: found[1]["environment"]["time"], default=None)


def read_result(path: Path) -> dict[str, Any]:
    """A result that a bench wrote. Raises ConfigurationError for a file that holds none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "--baseline", str(path), str(error), "Name a file that a bench wrote."
        ) from error
    if not isinstance(result, dict) or "measures" not in result:
        raise ConfigurationError("--baseline", str(path), "it has no measures", "Measure it again.")
    return result


def _results(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        result = json.loads(_committed(path) or path.read_text())
        if isinstance(result, dict) and "measures" in result:
            yield path, result


def _committed(path: Path) -> str:
    """The file's last committed version; empty where there is none."""
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _setting(result: dict[str, Any]) -> tuple[object, ...]:
    """What two runs must have in common to be compared."""
    # As JSON has it: a plan's tuples are lists there.
    plan = json.dumps(result["plan"], sort_keys=True)
    return result["bench"], plan, result["environment"]["device"], result.get("engine", {}).get("vllm")

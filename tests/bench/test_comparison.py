"""What is said of a result beside an earlier one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from canary_obs.bench.comparison import COMMITTED, compare, latest_of_its_kind, read_result
from canary_obs.bench.result import BenchResult, Measure
from canary_obs.errors import ConfigurationError


def result(**measures: Measure) -> BenchResult:
    return BenchResult(bench="step", title="", plan={"sizes": (1, 2)}, figures={}, measures=measures)


def committed(path: Path, time: str, **measures: Measure) -> dict[str, Any]:
    figures = result(**measures).to_json()
    figures["environment"] = figures["environment"] | {"time": time, "commit": f"of {time}"}
    path.write_text(json.dumps(figures))
    return figures


def test_what_got_worse_is_said_with_both_values_the_commit_and_the_goal(tmp_path: Path) -> None:
    earlier = committed(
        tmp_path / "a.json",
        "2026",
        decode=Measure(value=0.001, noise=0.001, goal=0.005),
        sweep=Measure(value=0.99, better="higher", noise=0.005),
        faster=Measure(value=30.0, noise=1.0),
        gone=Measure(value=1.0),
    )
    found = compare(
        result(
            decode=Measure(value=0.004, noise=0.0005, goal=0.005),
            sweep=Measure(value=0.95, better="higher", noise=0.005),
            faster=Measure(value=20.0, noise=1.0),
            new=Measure(value=5.0),
        ),
        earlier,
    )
    assert found.worse == (
        "decode: 0.001 at of 2026, now 0.004 (noise 0.0015, the goal is 0.005)",
        "sweep: 0.99 at of 2026, now 0.95 (noise 0.01)",
    )
    assert found.better == ("faster: 30 at of 2026, now 20 (noise 2)",)
    assert found.not_measured == ("gone",)
    assert found.compared == 3


def test_a_difference_within_the_noise_of_both_is_none(tmp_path: Path) -> None:
    earlier = committed(tmp_path / "a.json", "2026", decode=Measure(value=1.0, noise=0.2))
    found = compare(result(decode=Measure(value=1.29, noise=0.1)), earlier)
    assert (found.worse, found.better, found.compared) == ((), (), 1)


def test_the_newest_of_the_same_bench_plan_and_device_is_found(tmp_path: Path) -> None:
    now = result(decode=Measure(value=1.0))
    assert latest_of_its_kind(now, tmp_path) is None
    committed(tmp_path / "b.json", "2025", decode=Measure(value=2.0))
    committed(tmp_path / "a.json", "2026", decode=Measure(value=3.0))
    for name, change in (
        ("bench", {"bench": "patrol"}),
        ("plan", {"plan": {"sizes": [1, 3]}}),
        ("device", {"environment": {"device": "another", "time": "2027", "commit": "x"}}),
        ("engine", {"engine": {"vllm": "0.26.0"}}),
    ):
        figures = committed(tmp_path / f"{name}.json", "2027", decode=Measure(value=4.0))
        (tmp_path / f"{name}.json").write_text(json.dumps(figures | change))
    (tmp_path / "without_measures.json").write_text("[1]")
    found = latest_of_its_kind(now, tmp_path)
    assert found is not None
    assert found[0].name == "a.json"


def test_a_result_is_not_compared_with_itself(tmp_path: Path) -> None:
    """Benches write their file before they end, often over the committed one."""
    now = result(decode=Measure(value=1.0))
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(now.to_json()))
    assert latest_of_its_kind(now, tmp_path) is None
    committed(path, "2025", decode=Measure(value=2.0))
    git = "git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Earlier")):
        subprocess.run([*git, *command], check=True)
    path.write_text(json.dumps(now.to_json()))
    found = latest_of_its_kind(now, tmp_path)
    assert found is not None
    assert found[1]["measures"]["decode"]["value"] == 2.0


@pytest.mark.parametrize("text", ["", "[1]", '{"figures": 1}'])
def test_a_file_that_holds_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"--baseline"):
        read_result(path)
    with pytest.raises(ConfigurationError, match=r"No such file"):
        read_result(tmp_path / "missing.json")


def test_every_committed_result_names_its_commit_or_is_older_than_that_rule() -> None:
    """Results since the rule name it themselves; docs/measurements.md does it for the others."""
    page = (COMMITTED.parents[2] / "docs" / "measurements.md").read_text()
    documented = re.findall(r"`([\w-]+\.json)`", page)
    for path in sorted(COMMITTED.glob("*.json")):
        found = json.loads(path.read_text())
        if "measures" in found:
            assert found["environment"]["commit"] != "unknown", path.name
            assert not found["environment"]["commit"].endswith("-dirty"), path.name
        assert path.name in documented

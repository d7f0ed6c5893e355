"""Settings and metrics that runbooks, documents and deployment files name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from canary_obs.config import (
    FILE_VARIABLE,
    PREFIX as SETTING_PREFIX,
    CanaryConfig,
    ClientConfig,
    ServiceConfig,
)
from canary_obs.telemetry.catalog import PREFIX as METRIC_PREFIX, MetricType, all_metrics
from canary_obs.vocabulary import Cause, Reason

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "alerts/runbooks/*.md", "alerts/templates/*.yml", "docker/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
SETTINGS = {FILE_VARIABLE} | {
    SETTING_PREFIX + name.upper()
    for kind in (CanaryConfig, ServiceConfig, ClientConfig)
    for name in kind.__struct_fields__
}
LOG_PREFIX = "kv_canary_swa_divergence="  # of a line of the engine's log, not a metric

_SETTING = re.compile(rf"(?<![A-Z_]){SETTING_PREFIX}[A-Z_]+\b")
_METRIC = re.compile(rf"((?:rank|engine|gpu|release):)?\b({METRIC_PREFIX}\w+(?:\*|:\w+)?)")


def metrics() -> set[str]:
    names = {metric.name for metric in all_metrics()}
    for metric in all_metrics():
        if metric.type is MetricType.HISTOGRAM:
            names |= {f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "alerts/rules").glob("*.yml"))
    return names | set(re.findall(r"record: (\S+)", rules))


@pytest.mark.parametrize("file", FILES)
def test_every_setting_that_is_named_exists(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert set(_SETTING.findall(text)) - SETTINGS == set()


@pytest.mark.parametrize("file", FILES)
def test_every_metric_that_is_named_exists(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").replace(LOG_PREFIX, "")
    known = metrics()
    for prefix, name in _METRIC.findall(text):
        if name.endswith("*"):
            assert any(metric.startswith(name[:-1]) for metric in known), name
        else:
            assert prefix + name in known, prefix + name


def test_runbooks_do_not_advise_what_a_gpu_refuses() -> None:
    """`choose_backend` accepts only `triton` and `auto` where the KV is on a GPU."""
    for path in (ROOT / "alerts/runbooks").glob("*.md"):
        assert "KV_CANARY_BACKEND=torch" not in path.read_text(encoding="utf-8"), path.name


def test_every_reason_and_every_cause_is_explained_where_operators_look() -> None:
    runbooks = ROOT / "alerts/runbooks"
    damage = (runbooks / "KVCanaryDamage.md").read_text(encoding="utf-8")
    unverified = (runbooks / "KVCanaryUnverifiedHigh.md").read_text(encoding="utf-8")
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [reason for reason in Reason if f"`{reason}`" not in damage] == []
    assert [cause for cause in Cause if f"`{cause}`" not in unverified] == []
    assert [cause for cause in Cause if f"`{cause}`" not in architecture] == []

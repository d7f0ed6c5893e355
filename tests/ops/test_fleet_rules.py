"""The recording rules and the code judge alike; promtool evaluates the rules as Prometheus does."""

from __future__ import annotations

from collections import Counter
from math import isinf
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.render import RULES, thresholds
from canary_obs.fleet import thresholds as in_code
from canary_obs.fleet.evidence import Release
from canary_obs.fleet.verdict import Verdict, assess
from tests.fleet.cases import CASES, few_peers
from tests.fleet.histories import HOURS, MINUTES, SAMPLES, History, random_history, rule_test
from tests.ops.tools import judge

AT = f"{HOURS - 1}h"
SEEDS = range(12)


def promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    content = {"rule_files": [str(RULES / "fleet.yml")], "evaluation_interval": "1h", "tests": tests,
               "group_eval_order": ["kv-canary-fleet", "kv-canary-parts"]}  # fmt: skip
    (folder / "test.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    judge("promtool", "test", "rules", "test.yml", cwd=folder, package="prometheus")


def expected(history: History) -> list[dict[str, Any]]:
    """What the code finds, as expressions that must hold of the recorded series."""
    found = assess(history.evidence())
    verdicts = [
        {"labels": f'{{gpu_uuid="{gpu.gpu_uuid}",verdict="{gpu.verdict}"}}', "value": gpu.observed}
        for gpu in found.gpus
    ]
    scores = [f"abs(gpu:kv_canary_score:decades - {gpu.score!r}) < 1e-6" for gpu in found.gpus]
    checks = [
        {"expr": "sum by (gpu_uuid, verdict) (gpu:kv_canary_verdict:periods7d)", "exp_samples": verdicts},
        {
            "expr": "sum by (engine, engine_version, model) (release:kv_canary_suspect:gpus)",
            "exp_samples": [
                {"labels": _labels(suspect.release), "value": suspect.gpus} for suspect in found.releases
            ],
        },
    ]
    links = [
        {"labels": f'{{gpu_uuid="{gpu.gpu_uuid}",peer="{gpu.peer}"}}', "value": 1}
        for gpu in found.gpus
        if gpu.peer
    ]
    checks += [{"expr": "group by (gpu_uuid, peer) (gpu:kv_canary_link:periods7d)", "exp_samples": links}]
    for gpu, score in zip(found.gpus, scores, strict=True):
        uuid = f'{{gpu_uuid="{gpu.gpu_uuid}"}}'
        limit = "Inf" if isinf(gpu.expected) else repr(gpu.expected * (1 + 1e-9) + 1e-12)
        holds = (
            score.replace(":decades", f":decades{uuid}"),
            f"gpu:kv_canary_expected:periods7d{uuid} <= {limit}",
        )
        one = [{"labels": "{}", "value": 1}]
        checks += [{"expr": f"count({expression})", "exp_samples": one} for expression in holds]
    return [check | {"eval_time": AT} for check in checks]


def _labels(release: Release) -> str:
    named = {"engine": release.engine, "engine_version": release.engine_version, "model": release.model}
    return "{" + ",".join(f'{name}="{value}"' for name, value in named.items() if value) + "}"


def test_thresholds_are_the_same_in_both() -> None:
    known = {name: entry["value"] for name, entry in thresholds().items()}
    names = [name for name in vars(in_code) if name.isupper()]
    assert len(names) == 12
    for name in names:
        assert getattr(in_code, name) == known[name.lower()], name


@pytest.mark.ops
def test_random_fleets_are_judged_alike_by_rules_and_code(tmp_path: Path) -> None:
    histories = {seed: random_history(seed) for seed in SEEDS}
    promtool(
        tmp_path,
        [
            rule_test(f"seed {seed}", history, {"promql_expr_test": expected(history)})
            for seed, history in histories.items()
        ],
    )
    verdicts = Counter(
        gpu.verdict for history in histories.values() for gpu in assess(history.evidence()).gpus
    )
    assert set(verdicts) == set(Verdict), "every verdict was compared"
    assert any(assess(history.evidence()).releases for history in histories.values())


@pytest.mark.ops
def test_rules_that_differ_are_noticed(tmp_path: Path) -> None:
    history = few_peers()
    spoilt = expected(history)
    spoilt[0]["exp_samples"][0]["value"] += 1
    with pytest.raises(AssertionError, match="FAILED"):
        promtool(tmp_path, [rule_test("spoilt", history, {"promql_expr_test": spoilt})])


@pytest.mark.ops
def test_the_rules_judge_each_case_and_alert(tmp_path: Path) -> None:
    tests = []
    for name, (history, verdicts, _) in CASES.items():
        checks = expected(history)
        nodes = {gpu.uuid: gpu.last_node for gpu in history.gpus}
        paged = [
            {"labels": f'{{gpu_uuid="{uuid}",node="{nodes[uuid]}"}}', "value": 1}
            for uuid, verdict in verdicts.items()
            if verdict is Verdict.SUSPECT_GPU
        ]
        alerts = [
            {"expr": 'sum by (gpu_uuid, node) (ALERTS{alertname="KVCanarySuspectGPU"})', "eval_time": AT,
             "exp_samples": paged},
            {"expr": 'count(ALERTS{alertname="KVCanarySuspectRelease"})', "eval_time": AT,
             "exp_samples": [{"labels": "{}", "value": 1}] if name == "one bad release" else []},
        ]  # fmt: skip
        tests.append(rule_test(name, history, {"promql_expr_test": checks + alerts}))
    promtool(tmp_path, tests)


@pytest.mark.ops
def test_only_rows_that_are_remapped_count_as_remapped(tmp_path: Path) -> None:
    """Not a card that is divided into more MIG instances, an exporter's new names or a second service."""
    half = SAMPLES // 2
    old, new = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"
    ours = 'kv_canary_device_remapped_rows_total{gpu_uuid="GPU-two-services"'
    series = {
        f'{old}{{UUID="GPU-mig",GPU_I_ID="1"}}': f"2x{SAMPLES}",
        f'{old}{{UUID="GPU-mig",GPU_I_ID="2"}}': f"_x{half} 2x{half}",
        f'{old}{{UUID="GPU-upgraded"}}': f"3x{half} stale",
        f'{new}{{UUID="GPU-upgraded"}}': f"_x{half + 1} 3x{half}",
        f'{ours},error="correctable",instance="a"}}': f"1x{SAMPLES}",
        f'{ours},error="uncorrectable",instance="a"}}': f"4x{SAMPLES}",
        f'{ours},error="uncorrectable",instance="b"}}': f"_x{half} 4x{half}",
        f'{new}{{UUID="GPU-worse",GPU_I_ID="1"}}': f"2x{half} 3x{half}",
        f'{new}{{UUID="GPU-worse",GPU_I_ID="2"}}': f"2x{half} 3x{half}",
        'kv_canary_device_remapped_rows_total{gpu_uuid="GPU-ours",error="correctable"}': f"0x{half} 1x{half}",
        'DCGM_FI_DEV_ROW_REMAP_PENDING{UUID="GPU-waits"}': f"1x{SAMPLES}",
    }
    remapped = [
        {"labels": f'{{gpu_uuid="{uuid}"}}', "value": 1} for uuid in ("GPU-ours", "GPU-waits", "GPU-worse")
    ]
    check = {"expr": "sum by (gpu_uuid) (gpu:kv_canary_device_remaps:group)", "eval_time": AT}
    test = {
        "name": "remaps", "interval": f"{MINUTES}m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{**check, "exp_samples": remapped}],
    }  # fmt: skip
    promtool(tmp_path, [test])

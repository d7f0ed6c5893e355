"""README's claims: the example runs, versions are the code's, figures are those of the result files."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import canary_obs
from alerts.render import RUNBOOK_BASE
from canary_kernels.layout import RECORD_BYTES
from canary_obs.bench.shapes import POOLS
from canary_obs.config import DEFAULT_PORT
from canary_obs.engines.vllm.versions import V1_VERSIONS, V2_VERSIONS
from canary_obs.vocabulary import Reason

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/bench/results"
README = (ROOT / "README.md").read_text("utf-8")
MEASUREMENTS = (ROOT / "docs/measurements.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MOST_LINES = 136
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def result(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def section(text: str, title: str) -> str:
    return re.split(r"^#+ .*$", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(text: str) -> list[str]:
    return _NUMBER.findall(re.sub(r"\(V[12]\)", "", text))


def check_figures(shown: str, measured: list[float]) -> None:
    """Every number of a cell is a measured one, rounded to as many digits as are shown."""
    for text, value in zip(numbers(shown), measured, strict=True):
        assert abs(float(text) - value) <= 0.5000001 / 10 ** len(text.partition(".")[2]), (shown, measured)


def vllm_ratios(work: str) -> list[float]:
    return [result(f"h200_vllm_{runner}.json")[work]["throughput_ratio"] for runner in ("v2", "v1")]


def loads(file: str, *names: str) -> list[float]:
    """Time added to each load, in per cent."""
    return [100 * result(file)["measures"][name]["value"] for name in names]


def throughputs(file: str, *names: str) -> list[float]:
    """Of each load, relative to no canary."""
    return [result(file)["measures"][f"{name}: throughput"]["value"] for name in names]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_the_ten_lines_end_in_a_caught_violation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert re.search(r"reason=kv_data, phase=\w+, group=full, part=k, slot=7, ", printed.getvalue())


def test_every_reason_is_in_the_table() -> None:
    first = " ".join(cells[0] for cells in rows(section(README, "What it finds")))
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(Reason)


def test_the_versions_are_those_of_the_adapter() -> None:
    text = " ".join(section(README, "With vLLM").split())
    v1, v2 = re.search(r"Supported are vLLM (.*?) with the V1 model runner, and (.*?) with V2", text).groups()
    assert (tuple(numbers(v1)), tuple(numbers(v2))) == (V1_VERSIONS, V2_VERSIONS)
    table = rows(section((ROOT / "docs/vllm.md").read_text("utf-8"), "Versions"))
    assert [tuple(numbers(cells[1])) for cells in table] == [V1_VERSIONS, V2_VERSIONS]


def test_requirements_and_ports_are_those_of_the_code() -> None:
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", README)) == {str(DEFAULT_PORT)}
    assert {"vllm", "serve", "engine", "dev"} <= PROJECT["optional-dependencies"].keys()


def test_the_cost_table_holds_what_was_measured() -> None:
    pool = POOLS[0]
    slot_bytes = pool.layers * len(pool.parts) * pool.heads * pool.head_bytes
    kernels, cpu = result("kernels_h200.json"), result("cpu_compiled.json")
    by_work = {row["work"]: row for row in kernels["rows"]}
    alone = ("decode", "decode"), ("single", "decode"), ("single", "prefill")
    measured = [
        [RECORD_BYTES, 100 * RECORD_BYTES / slot_bytes, 8],  # "... of an 8B model's KV"
        vllm_ratios("decode"),
        vllm_ratios("prefill"),
        [
            *(
                result(f"h200_vllm_033_gpu_v2_{file}.json")[part]["throughput_ratio_median_pair"]
                for file, part in alone
            ),
            *throughputs("h200_vllm_033_load_8b_v2.json", "mixed"),
        ],
        loads("h200_load_small_v2.json", "decode"),
        loads("h200_sglang_8b.json", "decode", "single", "prefill"),
        [100 * by_work[f"{pool.name}: sweep, random"]["ratio"]],
        [cpu[run][1]["numba_us"]["step"] for run in ("bench_cpu_load_9", "bench_cpu_load_9_again")],
    ]
    table = rows(section(README, "What it costs"))
    for cells, values in zip(table, measured, strict=True):
        check_figures(cells[1], values)
        for file in re.findall(r"`([\w.]+\.json)`", cells[2]):
            assert (RESULTS / file).exists()
    assert cpu["bench_cpu_load_9"][1]["requests"] == 8
    assert {result(f"h200_vllm_{runner}.json")["vllm"] for runner in ("v1", "v2")} == {"0.26.0"}


def test_the_page_on_performance_begins_with_what_was_measured() -> None:
    alone = {file: result(f"h200_vllm_033_gpu_v2_{file}.json") for file in ("decode", "single")}
    ratio = "throughput_ratio_median_pair"
    both, sglang = "h200_vllm_033_load_8b_v2.json", "h200_sglang_8b.json"
    small = throughputs("h200_vllm_033_load_small_v2.json", "decode", "single", "mixed")
    added = [1 / (1 + value / 100) for value in loads(sglang, "decode", "single", "prefill", "mixed")]
    measured: list[list[list[float]]] = [
        [
            [alone["decode"]["decode"][ratio]],
            [alone["single"]["decode"][ratio]],
            [alone["single"]["prefill"][ratio], alone["decode"]["prefill"][ratio]],
            [],
        ],
        [
            *([value] for value in throughputs(both, "decode", "single")),
            [],
            throughputs("h200_vllm_033_load_8b_v2_be1d23af.json", "mixed"),
        ],
        [vllm_ratios("decode"), [], vllm_ratios("prefill"), []],
        [[value] for value in added],
        [[small[0]], [small[1]], [], [small[2]]],
    ]
    table = rows(section((ROOT / "docs/performance.md").read_text("utf-8"), "What it costs"))
    for cells, values in zip(table, measured, strict=True):
        for shown, figures in zip(cells[1:], values, strict=True):
            check_figures(re.sub(r"\(.*?\)", "", shown), figures)


def test_the_vllm_tables_hold_what_was_measured() -> None:
    table = rows(section((ROOT / "docs/vllm.md").read_text("utf-8"), "What it costs"))
    history = rows(section(MEASUREMENTS, "vLLM 0.26 on an H200"))
    for i, work in enumerate(("decode", "prefill", "fill")):
        v2, v1 = vllm_ratios(work)
        check_figures(" ".join(table[i][1:]), [v2, v1])
        check_figures(history[2 * i][-1], [v2])
        check_figures(history[2 * i + 1][-1], [v1])
    assert all(result(f"h200_vllm_{runner}.json")["violations"] == 0 for runner in ("v1", "v2"))


def test_the_latest_figures_of_the_reference_engine_are_those_of_the_result_files() -> None:
    step, pipeline, patrol = (result(f"h200_{name}.json") for name in ("step", "pipeline", "patrol"))
    lines = section(MEASUREMENTS, "The reference engine on an H200").splitlines()
    cells = {line.split("|")[1].strip(): line.strip("| ").split(" | ") for line in lines if "|" in line}
    ahead, waits = step["engine_runs_ahead"], step["engine_waits_each_step"]
    check_figures(cells["checks, engine ahead"][-2], [100 * ahead["checks_over_none"]])
    check_figures(cells["checks, engine waits"][-2], [100 * waits["checks_over_none"]])
    for row, engine in (
        ("GPU 50 steps behind", "gpu_steps_behind"),
        ("engine waits", "engine_waits_each_step"),
    ):
        times = pipeline[engine]["after_step_us"]
        check_figures(cells[row][-1], [times["p50"], times["p99"]])
    for row, budget in (("`1%` (default)", "1%"), ("`5GB/s`", "5GB/s"), ("`15GB/s`", "15GB/s")):
        share = 100 * patrol["by_budget"][budget]["checks_and_patrol_over_checks"]
        check_figures(cells[row][5], [abs(share)])


def test_every_result_file_is_explained() -> None:
    for path in RESULTS.glob("*.json"):
        pattern = re.sub(r"_drafts_\w+", "_drafts_*", path.name)
        assert path.name in MEASUREMENTS or pattern in MEASUREMENTS, path.name


def test_version_and_addresses_agree() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased = changes.split("## [Unreleased]", 1)[1].split("\n## ", 1)[0]
    assert canary_obs.__version__ == PROJECT["version"]
    assert f"Version {PROJECT['version']}." in unreleased or f"## [{PROJECT['version']}]" in changes
    assert all(
        url.startswith(PROJECT["urls"]["Repository"]) for url in (*PROJECT["urls"].values(), RUNBOOK_BASE)
    )

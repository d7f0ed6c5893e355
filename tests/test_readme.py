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
VLLM_026 = "h200_issue16_vllm_v2", "h200_restructured_vllm_v1"
DECODE, SINGLE = ("decode", "decode"), ("single", "decode")
PROMPTS = ("single", "prefill"), ("decode", "prefill")
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


def vllm_026(work: str) -> list[float]:
    """Throughput relative to no canary, V2 and V1."""
    return [result(f"{file}.json")[work]["throughput_ratio"] for file in VLLM_026]


def alone(*works: tuple[str, str]) -> list[float]:
    """Throughput of one vLLM 0.33 relative to no canary: of each result file a part."""
    return [
        result(f"h200_vllm_033_gpu_v2_{file}.json")[part]["throughput_ratio_median_pair"]
        for file, part in works
    ]


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
    kernels, cpu = result("h200_kernels_67f6b677.json"), result("cpu_compiled.json")
    by_work = {row["work"]: row for row in kernels["rows"]}
    measured = [
        [RECORD_BYTES, 100 * RECORD_BYTES / slot_bytes, 8],  # "... of an 8B model's KV"
        alone(DECODE, SINGLE, *PROMPTS),
        throughputs("h200_vllm_033_load_8b_v2_96791ae3.json", "mixed"),
        throughputs("h200_vllm_033_load_small_v2.json", "decode"),
        loads("h200_sglang_8b_one_engine.json", "decode", "single", "prefill"),
        [100 * by_work[f"{pool.name}: sweep, random"]["ratio"]],
        [cpu[run][1]["numba_us"]["step"] for run in ("bench_cpu_load_9", "bench_cpu_load_9_again")],
    ]
    table = rows(section(README, "What it costs"))
    for cells, values in zip(table, measured, strict=True):
        check_figures(cells[1], values)
        for file in re.findall(r"`([\w.]+\.json)`", cells[2]):
            assert (RESULTS / file).exists()
    assert cpu["bench_cpu_load_9"][1]["requests"] == 8


def test_the_page_on_performance_begins_with_what_was_measured() -> None:
    sglang = "h200_sglang_8b_one_engine.json"
    small = throughputs("h200_vllm_033_load_small_v2.json", "decode", "single", "mixed")
    added = [1 / (1 + value / 100) for value in loads(sglang, "decode", "single", "prefill", "mixed")]
    measured: list[list[list[float]]] = [
        [alone(DECODE), alone(SINGLE), alone(*PROMPTS), []],
        [
            throughputs("h200_vllm_033_load_8b_v2_96791ae3.json", "decode"),
            throughputs("h200_vllm_033_load_8b_v2_one_core.json", "single"),
            throughputs("h200_vllm_033_load_8b_v2_96791ae3.json", "prefill"),
            throughputs("h200_vllm_033_load_8b_v2_96791ae3.json", "mixed"),
        ],
        [vllm_026("decode"), [], vllm_026("prefill"), []],
        [[value] for value in added],
        [[small[0]], [small[1]], [], [small[2]]],
    ]
    table = rows(section((ROOT / "docs/performance.md").read_text("utf-8"), "What it costs"))
    for cells, values in zip(table, measured, strict=True):
        for shown, figures in zip(cells[1:], values, strict=True):
            check_figures(re.sub(r"\(.*?\)", "", shown), figures)


def test_the_vllm_tables_hold_what_was_measured() -> None:
    page = section((ROOT / "docs/vllm.md").read_text("utf-8"), "What it costs")
    newest, older = page.split("| vLLM 0.26 |")
    measured = [alone(DECODE), alone(SINGLE), alone(*PROMPTS), alone(("decode", "fill"))]
    for cells, values in zip(rows(newest), measured, strict=True):
        check_figures(cells[1], values)
    measurements = rows(section(MEASUREMENTS, "One engine, alone on its GPU"))
    for cells, values in zip(measurements[:4], (*measured[:2], measured[3], measured[2]), strict=True):
        check_figures(cells[2], values)
    both = [vllm_026(work) for work in ("decode", "prefill", "fill")]
    for table in (rows("| vLLM 0.26 |" + older), measurements[-3:]):
        for cells, values in zip(table, both, strict=True):
            check_figures(" ".join(cells[1:]), values)
    for file in VLLM_026:
        assert (result(f"{file}.json")["vllm"], result(f"{file}.json")["violations"]) == ("0.26.0", 0)


def test_the_figures_of_loads_are_those_of_the_result_files() -> None:
    table = {cells[0].split(" (")[0]: cells for cells in rows(section(MEASUREMENTS, "Two engines in turns"))}
    table["`ttft`"] = table["time to first token, idle engine"]
    on_h100 = "decode", "single", "prefill", "mixed", "ttft"
    for column, file, names in (
        (1, "h200_vllm_033_load_8b_v2", ("decode", "single", "prefill")),
        (1, "h200_vllm_033_load_8b_v2_be1d23af", ("mixed", "short", "ttft")),
        (2, "h200_vllm_033_load_8b_v1", ("mixed", "ttft")),
        (3, "h100_vllm_033_load_8b_v2", on_h100),
        (4, "h100_vllm_033_load_8b_v1", on_h100),
    ):
        measures = result(f"{file}.json")["measures"]
        for name in names:
            figure = measures[f"{name}: {'time to first token' if name == 'ttft' else 'throughput'}"]
            shown = table[f"`{name}`"][column]
            check_figures(shown, [figure["value"], figure["noise"]][: len(numbers(shown))])


def test_the_figures_of_loads_on_one_core_are_those_of_the_result_files() -> None:
    table = rows(section(MEASUREMENTS, "Engines on one core"))
    loads_of = {
        1: ("decode", "single", "mixed", "prefill", "ttft", "ttft-busy"),
        2: ("decode", "single", "mixed", "", "ttft", ""),
    }
    of_8b = "h200_vllm_033_load_8b_v2_one_core", "h200_vllm_033_load_8b_v2_96791ae3"
    for column, files in ((1, of_8b), (2, ("h200_vllm_033_load_small_v2",))):
        found = {name: each for file in files for name, each in result(f"{file}.json")["loads"].items()}
        for cells, name in zip(table, loads_of[column], strict=True):
            figure = found[name]["ttft_ms" if "ttft" in name else "throughput"] if name else {}
            check_figures(cells[column], [figure["ratio"], *figure["ratio_95"]] if figure else [])


def test_the_figures_of_sglang_are_those_of_the_result_files() -> None:
    table = rows(section(MEASUREMENTS, "Throughput"))
    names = "decode", "few", "single", "prefill", "mixed"
    for shape, lines in (("8b", table[:5]), ("small", table[6:])):
        one, apart = f"h200_sglang_{shape}_one_engine.json", f"h200_sglang_{shape}.json"
        for file, column in ((one, 1), (apart, 3)):
            for cells, value in zip(lines, loads(file, *names), strict=True):
                shown = re.sub(r"\(.*?\)", "", cells[column])
                check_figures(shown, [abs(value)])
                assert ("-" in shown) == (value < 0)
        for file, column, engine in ((one, 1, "log"), (apart, 4, "sglang-all")):
            for cells, name in zip(lines, names, strict=True):
                own = result(file)["loads"][name]["overhead"][engine]
                added = [100 * value for value in (own["overhead"], *own["overhead_95"])]
                check_figures(cells[column], list(map(abs, added)))
                assert cells[column].count("-") == sum(value < 0 for value in added)
    page = rows(section((ROOT / "docs/sglang.md").read_text("utf-8"), "What it costs"))
    states = rows(section(MEASUREMENTS, "States of linear attention"))
    expected = [[cells[1], cells[4]] for cells in (*table[:5], table[6])]
    assert [cells[1:] for cells in page] == [*expected, *([cells[3], ""] for cells in states[:2])]


def test_the_figures_of_states_are_those_of_the_result_files() -> None:
    files = "qwen3_next_one_program", "qwen3_next_each_step", "qwen3_next"
    for column, file in enumerate(files, 1):
        found = result(f"h200_sglang_{file}.json")["loads"]
        names = ("decode", "few", "single")
        for cells, name in zip(rows(section(MEASUREMENTS, "States of linear attention")), names, strict=True):
            own = found[name]["overhead"]["log"]
            added = [100 * value for value in (own["overhead"], *own["overhead_95"])]
            check_figures(cells[column], list(map(abs, added)))
            assert cells[column].count("-") == sum(value < 0 for value in added)


def test_the_figures_of_states_in_vllm_are_those_of_the_result_file() -> None:
    found = result("h200_vllm_qwen3_next_v2.json")["loads"]
    figures = [
        found["decode"]["throughput"], found["decode"]["itl_p50_ms"], found["single"]["throughput"],
        found["mixed"]["throughput"],
    ]  # fmt: skip
    for cells, own in zip(rows(section(MEASUREMENTS, "States in vLLM")), figures, strict=True):
        check_figures(cells[2], [own["ratio"], *own["ratio_95"]])


def test_what_arrived_damaged_in_pairs_of_servers_is_in_the_result_files() -> None:
    page = (ROOT / "docs/sglang.md").read_text("utf-8")
    table = rows(section(page, "Injected faults in pairs of servers on a GPU"))
    assert len(table) == 3
    for _, *cells, file in table:
        run = result(file.strip("`"))
        arrived = sum(group["hashed"]["head"] for group in run["clean"]["decode"]["groups"].values())
        flipped = run["perturbed"]["prefill"]["injected"]["real_kv_post_forward"].values()
        found = run["found"]["decode head kv_data from its peer"]
        assert cells == [str(arrived), str(sum(flipped)), str(found)]
        assert run["answers"]["equal"] == run["answers"]["of"] == 48
        assert {server["state"] for server in run["clean"].values()} == {"ok"}
        assert not run["problems"]


def test_the_injected_faults_of_sglang_are_those_of_the_result_files() -> None:
    table = rows(section((ROOT / "docs/sglang.md").read_text("utf-8"), "Injected faults on a GPU"))
    assert len(table) == 27
    for _, *cells, file in table:
        run = result(file.strip("`"))
        counts = [
            count
            for ranks in run["perturbed"].values()
            for rank in ranks.values()
            for count in rank["injected"].values()
        ]
        found = [sum(count[name] for count in counts) for name in ("detected", "open", "missed")]
        hits = [
            group["hashed"].get("hit", 0)
            for rank in run["clean"].values()
            for group in rank["groups"].values()
        ]
        assert cells == [str(count) for count in (*found, sum(hits))]
        assert run["answers"]["equal"] == run["answers"]["of"] >= 48
        # The script asked for 1 000 states then, as if each forward were checked with them.
        few = ["rank 0 has verified {'head': 0, 'tail': 201} in state"]
        assert run["problems"] == (few if "states_interval" in file else [])


def test_the_figures_of_kernels_are_those_of_the_result_file() -> None:
    figures = {row["work"]: row for row in result("h200_kernels_67f6b677.json")["rows"]}
    first, second = section(MEASUREMENTS, "Kernels").split("Before a forward")
    pool = POOLS[0].name
    measured = [
        *([figures[f"{pool}: {work}"]["ratio"]] for work in ("sweep, random", "sweep, sequential")),
        [figures[f"{pool}: fingerprints of 8192"]["ratio"]],
        [figures["prefill 1 x 8192 after 0: chain"]["us"]],
        *([figures[f"decode {shape} x 4096: verify"]["us"]] for shape in (256, 64)),
        [figures["decode 256 x 4096: head and tail with writes"]["us"]],
    ]
    *table, host = rows(first)
    for cells, values in zip(table, measured, strict=True):
        check_figures(cells[1], values)
    launches = [row["us"] for work, row in figures.items() if work.endswith("host, 4 launches")]
    check_figures(host[1], [min(launches), max(launches)])
    for cells, shape in zip(rows(second), POOLS, strict=True):
        compared = [
            f"{shape.name}: a forward's comparison of {slots}, L2 flushed" for slots in (1, 16, 64, 256)
        ]
        check_figures(" ".join(cells[1:5]), [figures[work]["us"] for work in compared])
        swept = [figures[f"{shape.name}: sweep, {order}"]["ratio"] for order in ("random", "sequential")]
        check_figures(" ".join(cells[5:]), swept)


def test_the_latest_figures_of_the_reference_engine_are_those_of_the_result_files() -> None:
    step, pipeline = result("h200_issue17_step.json"), result("h200_restructured_pipeline.json")
    by_budget = result("h200_patrol.json")["by_budget"]
    times = [pipeline[engine]["after_step_us"] for engine in ("gpu_steps_behind", "engine_waits_each_step")]
    prefill = step["measures"]["prefill: checks_and_patrol over none"]
    measured = [
        [100 * step["engine_runs_ahead"]["checks_over_none"]],
        [100 * step["engine_waits_each_step"]["checks_over_none"]],
        [100 * abs(prefill["value"]), 100 * prefill["noise"]],
        *([time["p50"], time["p99"]] for time in times),
        *(
            [100 * abs(by_budget[budget]["checks_and_patrol_over_checks"])]
            for budget in ("1%", "5GB/s", "15GB/s", "50GB/s")
        ),
    ]
    for cells, values in zip(rows(section(MEASUREMENTS, "The reference engine")), measured, strict=True):
        check_figures(cells[2], values)


def test_every_result_file_is_explained() -> None:
    """And only those: what the page names is there."""
    named = set(re.findall(r"`([\w.-]+\.json)`", MEASUREMENTS))
    assert named == {path.name for path in RESULTS.glob("*.json")}


def test_version_and_addresses_agree() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased = changes.split("## [Unreleased]", 1)[1].split("\n## ", 1)[0]
    assert canary_obs.__version__ == PROJECT["version"]
    assert f"Version {PROJECT['version']}." in unreleased or f"## [{PROJECT['version']}]" in changes
    assert all(
        url.startswith(PROJECT["urls"]["Repository"]) for url in (*PROJECT["urls"].values(), RUNBOOK_BASE)
    )

"""The V2 model runner on a CPU through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.engines.vllm.real import perturbed, prefix_hits
from tests.engines.vllm.real.server import Process
from tests.engines.vllm.real.test_accounts import report_forwards, report_hidden, report_walks
from tests.engines.vllm.real.test_adopted import report_adopted
from tests.engines.vllm.real.test_tables import check_tables, report_tables
from tests.engines.vllm.real.test_tokens import report_tokens
from tests.sizes import sized
from tests.unchecked import Report

# The first test waits for the process of all: 80 s on two quiet cores.
pytestmark = pytest.mark.timeout(600)
ENGINE = {"max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 200}
DRAFTS = {"draft_model": "llama_near"} | sized({"eagle": "llama_eagle"}, {})
GROUPS = {
    "llama": ["full"],
    "gemma3": ["swa", "swa2", "full"],
    **{method: ["full", "draft"] for method in DRAFTS},
}
SECONDS = 560.0


@pytest.fixture(scope="module")
def report(models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {
        name: {"model": str(models(name)), "engine": ENGINE, "prompts": 8} for name in ("llama", "gemma3")
    }
    for method, draft in DRAFTS.items():
        speculation = {"method": method, "model": str(models(draft)), "num_speculative_tokens": 2}
        engine = ENGINE | {"speculative_config": speculation}
        cases[method] = {"model": str(models("llama")), "engine": engine, "prompts": 3}
    for name in ("llama", "draft_model"):
        cases[name]["accounts"] = True
    folder = tmp_path_factory.mktemp("v2")
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.engines.vllm.real.interpreted"]
    settings = {"KV_CANARY_SWA_DIVERGENCE_INTERVAL": "1"}
    arguments = [str(folder / name) for name in ("cases.json", "results.json")]
    process = Process([*command, *arguments], settings, folder / "log")
    try:
        assert process.wait(SECONDS) == 0, process.log.read_text()[-12000:]
    finally:
        process.stop()
    return json.loads((folder / "results.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", GROUPS)
def test_clean_and_faults(report: dict[str, Any], case: str) -> None:
    found = report[case]
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found["clean"] == []
    assert found["answers"] == found["plain"]
    assert found["state"] == ["ok", "()"]
    assert found["groups"] == GROUPS[case]
    assert found["checks"] > 10_000
    assert found["swept"] > 0
    assert found["zeroed"] == ["kv_data"]
    assert "token" in found["exchanged"]
    assert ("windows" in found) is (case == "gemma3")


def test_windows_are_compared_as_the_scheduler_has_them(report: dict[str, Any]) -> None:
    windows = report["gemma3"]["windows"]
    reported = windows["reported"]
    assert reported["step"] == windows["step"]
    assert (reported["swa_groups"], reported["full_groups"]) == (["swa", "swa2"], ["full"])
    counts = [reported[name] for name in ("out_of_window", "index_divergence")]
    assert counts == windows["scheduled"]
    assert min(counts) >= 1
    assert 0 < reported["verified_swa"] < reported["verified_full"]


def test_the_end_of_a_step_is_launched_after_the_logits(report: dict[str, Any]) -> None:
    """Concurrent work would slow the logits; only what must precedes the forward."""
    begun = ["join", "before_write", "forward", "compute_logits"]
    end = ["ALL", "forward_launched", "after_forward", "after_step", "leave"]
    assert report["llama"]["order"] == [*begun, *end, "postprocess_sampled"]
    # Sampling that takes another way to its logits ends the step no less.
    assert report["llama"]["order_unseen"] == [*begun, "postprocess_sampled", *end]


@pytest.mark.parametrize("case", DRAFTS)
def test_drafting_ends_a_step(report: dict[str, Any], case: str) -> None:
    """Its forward is shown with the draft's own, once that has run."""
    calls = [call for call in report[case]["order"] if call not in ("join", "ALL", "leave")]
    forward = calls.index("forward")
    assert calls[:forward] == ["before_write", "forward_launched"]
    assert calls.index("compute_logits") > calls.index("after_forward")
    assert calls[-3:] == ["forward_launched", "after_forward", "after_step"]


@pytest.mark.parametrize(("case", "ways"), [("llama", 3), ("draft_model", 1)])
def test_forwards_that_are_not_shown(report: dict[str, Any], unchecked: Report, case: str, ways: int) -> None:
    assert len(report[case]["forwards"]) == ways
    report_forwards("vLLM V2", report[case]["forwards"], unchecked)


@pytest.mark.parametrize("case", ["llama", "draft_model"])
def test_tables_that_are_not_the_runners(report: dict[str, Any], unchecked: Report, case: str) -> None:
    check_tables(report[case]["tables"], {"full"})
    report_tables("vLLM V2", report[case]["tables_unseen"], unchecked)


def test_layers_and_bytes_that_are_hidden(report: dict[str, Any], unchecked: Report) -> None:
    report_hidden("vLLM V2", report["llama"]["hidden"], unchecked)


def test_walks_that_leave_blocks_out(report: dict[str, Any], unchecked: Report) -> None:
    assert len(report["llama"]["walks"]) == 4
    report_walks("vLLM V2", report["llama"]["walks"], unchecked)


@pytest.mark.parametrize("case", ["llama", "draft_model"])
def test_a_damaged_block_is_seen_in_the_step_that_hits_it(report: dict[str, Any], case: str) -> None:
    found = report[case]["damaged_hit"]
    assert found.pop("seconds") < 5.0
    assert found == prefix_hits.FOUND


def test_prefix_hits_that_are_not_compared(report: dict[str, Any], unchecked: Report) -> None:
    assert len(report["llama"]["hits"]) == 5
    report_walks("vLLM V2", report["llama"]["hits"], unchecked)


def test_slots_without_a_history(report: dict[str, Any], unchecked: Report) -> None:
    report_adopted("vLLM V2", report["llama"]["adopted"], unchecked)


@pytest.mark.parametrize("case", DRAFTS)
def test_draft_layers(report: dict[str, Any], case: str) -> None:
    """Captured graphs apart, drafting is what it is on a GPU: all its state lies on the device."""
    assert report[case]["sampled"] >= 2
    assert report[case]["draft_zeroed"] == ["kv_data"]


def test_wrong_tokens_are_found_and_comparisons_that_do_not_run(
    report: dict[str, Any], unchecked: Report
) -> None:
    report_tokens("vLLM V2", report["llama"]["tokens"], unchecked)


def test_every_injection_is_accounted_for(report: dict[str, Any]) -> None:
    perturbed.check(report["llama"]["perturbed"])

"""What the job for a new vLLM release reports, of sources written here; `.ci/nightly` reads real ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from canary_obs.engines.vllm.versions import FIELDS, HOOKS, RUNNER_HOOKS

SCRIPT = Path(__file__).parents[2] / "tools/newest_vllm.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("newest_vllm", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Sources in which every method that is wrapped takes the parameters expected."""
    for path, methods in (*HOOKS.items(), *RUNNER_HOOKS.items()):
        module, name = path.split(":")
        file = tmp_path / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"class {name}:"]
        lines += [f"    def {method}(self, {', '.join(wanted)}): ..." for method, wanted in methods.items()]
        with file.open("a", encoding="utf-8") as written:
            written.write("\n".join(lines) + "\n")
    for path, names in FIELDS.items():
        module, name = path.split(":")
        file = tmp_path / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as written:
            written.write("\n".join([f"class {name}:", *(f"    {one}: int" for one in sorted(names))]) + "\n")
    (tmp_path / "vllm-9.9.dist-info").mkdir()
    (tmp_path / "vllm-9.9.dist-info/METADATA").write_text("Name: vllm\nVersion: 9.9\n")
    specs = tmp_path / "vllm/v1/kv_cache_interface.py"
    specs.write_text("class FullAttentionSpec: ...\nclass RingSpec: ...\nclass Other: ...\n")
    drafters = tmp_path / "vllm/v1/spec_decode/new.py"
    drafters.parent.mkdir(parents=True)
    drafters.write_text("class EagleProposer: ...\nclass OracleProposer: ...\n")
    return tmp_path


def reported(tool: ModuleType, release: Path, *more: str) -> tuple[int, dict[str, object]]:
    report = release / "report.json"
    status = tool.main([str(report), "--source", str(release), *more])
    return status, json.loads(report.read_text())


def test_a_release_whose_methods_answer(tool: ModuleType, release: Path) -> None:
    status, report = reported(tool, release)
    assert (status, report["version"], report["differing"]) == (0, "9.9", [])
    assert report["groups_left_out"] == ["RingSpec"]
    assert report["drafters_not_checked"] == ["OracleProposer"]
    assert "MTPSpeculator" in report["drafters_gone"]  # type: ignore[operator]
    assert "groups left out: RingSpec" in tool.summary(report)


def test_methods_that_are_missing_or_take_other_parameters(
    tool: ModuleType, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = release / "vllm/v1/core/block_pool.py"
    text = pool.read_text().replace(
        "def move_block_hashes(self, src_block,", "def move_block_hashes(self, source,"
    )
    pool.write_text(text.replace("def reset_prefix_cache", "def clear_prefix_cache"))
    (release / "vllm/v1/worker/worker_base.py").unlink()
    status, report = reported(tool, release)
    assert status == 1
    assert report["differing"] == [
        {
            "method": "vllm.v1.core.block_pool:BlockPool.move_block_hashes",
            "expected": ["src_block", "dst_block"], "found": ["source", "dst_block"],
        },
        {"method": "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache", "expected": [], "found": None},
        {
            "method": "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config",
            "expected": ["kv_cache_configs"], "found": None,
        },
    ]  # fmt: skip
    assert "move_block_hashes takes ['source', 'dst_block']" in capsys.readouterr().out


def test_an_inherited_method_answers(tool: ModuleType, release: Path) -> None:
    file = release / "vllm/v1/core/sched/scheduler.py"
    file.write_text("class Base:\n    async def schedule(self, more): ...\nclass Scheduler(Base): ...\n")
    assert reported(tool, release)[0] == 0


def test_a_suite_that_fails_fails_the_job(tool: ModuleType, release: Path) -> None:
    broken = release / "python"
    broken.write_text(f"#!{sys.executable}\nprint('FAILED one\\n1 failed')\nraise SystemExit(1)\n")
    broken.chmod(0o755)
    status, report = reported(tool, release, "--run", str(broken))
    assert status == 1
    assert report["suite"] == {"status": 1, "failed": ["FAILED one"], "last": "1 failed"}


def test_a_field_that_is_read_and_gone_is_named(
    tool: ModuleType, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = release / "vllm/v1/core/sched/output.py"
    file.write_text(file.read_text().replace("    prompt_token_ids: int\n", ""))
    status, report = reported(tool, release)
    gone = {"class": "vllm.v1.core.sched.output:NewRequestData", "fields": ["prompt_token_ids"]}
    assert (status, report["fields_missing"]) == (1, [gone])
    assert "NewRequestData has no prompt_token_ids" in capsys.readouterr().out

"""Full and sliding-window groups of a hybrid model, side by side."""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.runtime.report.swa_divergence import LOG_KEY
from canary_obs.vocabulary import Phase, State
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.server import Process, call, wait_until


def test_the_three_signals(make_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig("gemma3", canary={"swa_divergence_interval": "10"}, num_gpu_blocks_override=150)
    rig.generate(prompts(24), 24)
    rig.generate(prompts(24)[::-1], 24)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    final = rig.canary.detach()
    lines = [line for line in caplog.messages if line.startswith(LOG_KEY)]
    reports = [json.loads(line.removeprefix(f"{LOG_KEY}=")) for line in lines]
    assert [report["step"] for report in reports[:4]] == [10, 20, 30, 40]
    for report in reports[1:]:
        assert report["out_of_window"] >= 1
        assert report["index_divergence"] >= 1
        assert 0 < report["verified_swa"] < report["verified_full"]
        assert (report["full_groups"], report["swa_groups"]) == (["full"], ["swa", "swa2"])
    assert final.swa_divergence is not None
    verified = {name: group.verified for name, group in final.groups.items()}
    around = {name: phases[Phase.HEAD] + phases[Phase.TAIL] for name, phases in verified.items()}
    assert reports[-1]["step"] == final.swa_divergence.step == final.step
    assert reports[-1]["verified_full"] == around["full"]
    assert reports[-1]["verified_swa"] == min(around["swa"], around["swa2"])


def test_the_reported_tokens_are_those_of_the_schedulers_tables(make_rig: Any) -> None:
    rig = make_rig("gemma3", canary={"swa_divergence_interval": "1"}, num_gpu_blocks_override=150)
    rig.start({f"r{number}": prompt for number, prompt in enumerate(prompts(6))}, 30)
    seen = set()
    for _ in range(24):
        rig.step()
        found = rig.canary.swa.latest
        assert found is not None
        assert found.step == rig.canary.step
        wanted = rig.scheduled_windows()
        assert (found.out_of_window, found.index_divergence) == wanted
        seen.add(wanted)
    assert len(seen) > 10
    assert max(missing for missing, _ in seen) > 0
    rig.finish()


def test_a_window_group_that_is_shown_the_full_tables_has_no_divergence(make_rig: Any) -> None:
    rig = make_rig("gemma3", canary={"swa_divergence_interval": "1"})
    rig.start({"a": prompts(1)[0]}, 30)
    rig.step(3)
    assert rig.canary.swa.latest.index_divergence > 0
    lists = rig.runner.requests[next(iter(rig.runner.requests))].block_ids
    right = list(lists[0])
    lists[0][:] = lists[2][: len(right)]
    rig.step()
    assert rig.canary.swa.latest.index_divergence == 0
    lists[0][: len(right)] = right
    rig.step()
    assert rig.canary.swa.latest.index_divergence > 0
    rig.finish()


def test_metrics_and_api_tell_what_the_log_line_tells(make_rig: Any, tmp_path: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvc") as folder:
        endpoint = f"ipc://{Path(folder)}/s.sock"
        command = [sys.executable, "-m", "canary_obs", "serve", "--endpoint", endpoint, "--port", str(port)]
        service, base = Process(command, {}, tmp_path / "service.log"), f"http://127.0.0.1:{port}"
        try:
            service.wait_for(f"{base}/healthz")
            settings = {"endpoint": endpoint, "swa_divergence_interval": "1"}
            rig = make_rig("gemma3", canary=settings)
            rig.generate(prompts(8), 24)
            latest = msgspec.to_builtins(rig.canary.swa.latest)
            assert min(latest["index_divergence"], latest["out_of_window"]) >= 1

            def shown() -> Any:
                ranks = call(f"{base}/canary/status")[1]["ranks"]
                snapshot = ranks[0]["snapshot"] if ranks else None  # its messages may be on their way
                found = snapshot and snapshot["swa_divergence"]
                return found if found and found["step"] == latest["step"] else None

            found = wait_until(shown)
            assert found == json.loads(json.dumps(latest))
            values = {
                (name, group): float(value)
                for name, group, value in re.findall(
                    r'^kv_canary_swa_(\w+){.*?(?:group="(\w+)".*)?} (\S+)$', call(f"{base}/metrics")[1], re.M
                )
            }
            assert values["index_divergence", ""] == latest["index_divergence"]
            assert values["out_of_window_tokens", ""] == latest["out_of_window"]
            verified = "slots_verified_total"
            assert 0 < values[verified, "swa"] < values[verified, "full"]
            rig.close()
        finally:
            service.stop()


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_nothing_is_reported_without_both_kinds(
    make_rig: Any, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    caplog.set_level(logging.INFO, "canary_obs")
    rig = make_rig(model, canary={"swa_divergence_interval": "1"})
    rig.generate(prompts(2), 4)
    assert rig.canary.step > 3
    assert rig.canary.detach().swa_divergence is None
    assert LOG_KEY not in caplog.text

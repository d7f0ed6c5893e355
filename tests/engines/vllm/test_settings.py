"""Bad settings of the line to the service: refused when vLLM starts, survived later."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from canary_obs.config import CanaryConfig
from canary_obs.engines.vllm import plugin
from canary_obs.errors import ConfigurationError
from canary_obs.runtime.refusal import Refusal


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("KV_CANARY_ENDPOINT", "tcp://10.0.0.5:9470", "beyond loopback TCP needs keys"),
        ("KV_CANARY_ENGINE_SECRET_KEY_FILE", "/no/such.secret", "requires service_public_key_file"),
    ],
)
def test_the_plugin_refuses_at_once(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, rule: str
) -> None:
    monkeypatch.setattr(plugin, "_patches", None)
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    monkeypatch.setenv(setting, value)
    with pytest.raises(ConfigurationError, match=rule):
        plugin.register()
    assert plugin._patches is None


def test_a_key_file_that_is_gone_by_now_kills_no_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CanaryConfig(
        endpoint="tcp://10.0.0.5:9470",
        engine_secret_key_file=str(tmp_path / "gone"),
        service_public_key_file=str(tmp_path / "gone"),
    )
    with caplog.at_level(logging.ERROR, "canary_obs"):
        Refusal("the layout is not explained", config, ("vllm", "1.0")).close()
    assert "the layout is not explained" in caplog.text
    assert f"engine_secret_key_file='{tmp_path}/gone': cannot be read: No such file" in caplog.text

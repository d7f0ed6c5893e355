"""Code in the documents is code: Python compiles, TOML parses, settings take the values that are shown."""

from __future__ import annotations

import json
import re
import tomllib

import msgspec
import pytest

from canary_obs.config import CanaryConfig, ServiceConfig, load
from canary_obs.errors import ConfigurationError
from canary_obs.hub.hub import Hub
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import Reason
from tests.docs.test_documents import ROOT, text_of
from tests.service.fakes import counters, hello, identity, snapshot

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "alerts/runbooks/*.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VALUE = re.compile(r"\b(KV_CANARY_[A-Z_]+)=('[^']*'|[^\s`,)|;]+)")
# A setting that is refused without another one.
_WITH = {"KV_CANARY_PERTURB": {"KV_CANARY_PERTURB_ENABLED": "true"}}
_KEYS = {"KV_CANARY_ENDPOINT"}  # tcp:// needs key files


@pytest.mark.parametrize("file", FILES)
def test_every_block_is_of_its_language(file: str) -> None:
    for language, block in _BLOCK.findall(text_of(file)):
        match language:
            case "python":
                compile(block, file, "exec")
            case "toml":
                tomllib.loads(block)
            case "json":
                json.loads(block)
            case _:
                assert language in ("sh", "text", "yaml"), language


@pytest.mark.parametrize("file", FILES)
def test_every_value_of_a_setting_is_accepted(file: str) -> None:
    for name, text in _VALUE.findall(text_of(file)):
        value = text.strip("'")
        if "$" in value or "..." in value or value.isupper() or name in _KEYS or "inf" in value:
            continue
        for kind in (CanaryConfig, ServiceConfig):
            load(kind, environ={name: value, **_WITH.get(name, {})})


def test_a_value_that_is_wrong_would_be_noticed() -> None:
    ((name, value),) = _VALUE.findall("`KV_CANARY_MODE=loud`")
    with pytest.raises(ConfigurationError):
        load(CanaryConfig, environ={name: value})


def test_what_was_not_measured_is_absent_and_what_can_happen_is_0() -> None:
    """The names under "Absent, not 0" in docs/findings.md."""
    text = text_of("docs/findings.md").split("## Absent, not 0\n", 1)[1]
    absent = re.findall(r"`kv_canary_(\w+?)\*?`", text)
    assert len(absent) == 3
    hub = Hub()
    hub.ingest(hello(identity()), lambda command: None)
    fresh = snapshot(identity(), 1, groups={"full": counters(0)})
    fresh = msgspec.structs.replace(fresh, swa_divergence=None, last_sweep_ns=None)
    hub.ingest(fresh, lambda command: None)
    page = Exposition(HubCollector(hub)).page("")[0].decode()
    assert [name for name in absent if f"kv_canary_{name}" in page] == []
    zeros = re.findall(r'^kv_canary_violations_total\{.*reason="(\w+)"\} 0\.0$', page, re.MULTILINE)
    assert set(zeros) == set(Reason)

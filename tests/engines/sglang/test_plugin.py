"""What the plugin does where there is nothing to do: nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.sglang import plugin
from canary_obs.errors import ConfigurationError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of hooks, as a stand-in for SGLang's registry takes them."""
    found: list[str] = []
    registry = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=lambda target, hook, kind: found.append(target)),
        HookType=SimpleNamespace(AROUND="around"),
    )
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[]))
    for name in ("sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr(plugin, "_registered", False)
    for switch in plugin.SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    return found


def test_without_a_switch_nothing_is_hooked(registered: list[str]) -> None:
    plugin.register()
    assert registered == []


@pytest.mark.parametrize(("mode", "hooked"), [("none", 0), ("log", 5), ("raise", 5)])
def test_hooks_are_registered_once(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, mode: str, hooked: int
) -> None:
    monkeypatch.setenv("KV_CANARY_MODE", mode)
    plugin.register()
    plugin.register()
    assert registered == list(plugin.HOOKS)[:hooked]


@pytest.mark.parametrize(("name", "value"), [("MODE", "loud"), ("ENDPOINT", "http://here")])
def test_a_bad_setting_is_refused_before_the_engine_loads(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    monkeypatch.setenv(f"KV_CANARY_{name}", value)
    with pytest.raises(ConfigurationError):
        plugin.register()
    assert registered == []


@pytest.mark.parametrize(
    ("tags", "concerned"), [(None, True), ([], True), (["weights"], False), (["weights", "kv_cache"], True)]
)
def test_memory_of_other_kinds_may_go(tags: Any, concerned: bool) -> None:
    request = SimpleNamespace(tags=tags)
    assert plugin._concerns_kv((request,), {}) is concerned
    assert plugin._concerns_kv((), {"recv_req": request}) is concerned


def test_no_hook_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that leaves a hook does, so it leaves in mode `raise` only."""

    def fail() -> None:
        raise ValueError("made up")

    monkeypatch.setattr(plugin, "_missing_hooks", fail)
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    engine = SimpleNamespace()
    ports = SimpleNamespace(tokenizer_ipc_name="ipc:///made-up")
    assert plugin.attach_after_init(lambda *_: "built", engine, "settings", ports) == "built"
    assert vars(engine) == {plugin._SERVER: "ipc:///made-up"}
    request = SimpleNamespace(tags=None)
    for hook in (plugin.detach_before_release, plugin.attach_after_resume):
        assert hook(lambda *_: "done", SimpleNamespace(), request) == "done"
    monkeypatch.setenv("KV_CANARY_MODE", "raise")
    with pytest.raises(ValueError, match="made up"):
        plugin.attach_after_init(lambda *_: "built", engine, "settings", ports)

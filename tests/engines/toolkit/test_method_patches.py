"""Replaced attributes come back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable

from canary_obs.engines.toolkit.method_patches import MethodPatches


class Engine:
    def step(self) -> str:
        return "step"


def louder(original: Callable[[], str]) -> Callable[[], str]:
    return lambda: original() + "!"


def test_an_instance_is_restored_exactly() -> None:
    engine, patches = Engine(), MethodPatches()
    patches.wrap(engine, "step", louder)
    patches.wrap(engine, "step", louder)
    patches.set(engine, "pending", [])
    assert engine.step() == "step!!"
    assert engine.step.__name__ == "step"
    for _ in range(2):
        patches.restore()
        assert vars(engine) == {}
    assert engine.step() == "step"


def test_a_class_is_restored_exactly() -> None:
    before, patches = vars(Engine)["step"], MethodPatches()
    patches.wrap(Engine, "step", lambda original: lambda self: original(self) + "?")
    assert Engine().step() == "step?"
    patches.restore()
    assert vars(Engine)["step"] is before


def test_what_another_tool_has_removed_stays_removed() -> None:
    engine, patches = Engine(), MethodPatches()
    patches.wrap(engine, "step", louder)
    del engine.step
    patches.restore()
    assert vars(engine) == {}

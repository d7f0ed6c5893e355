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


def test_what_wraps_a_classs_method_wraps_that_of_one_instance() -> None:
    """Also where another tool has given it a method of its own, or one of another object."""
    other = Engine()
    for own in (None, other.step, lambda: "step"):
        engine, patches = Engine(), MethodPatches()
        if own is not None:
            engine.step = own  # type: ignore[method-assign]
        given: list[object] = []

        def noted(original: Callable[..., str], given: list[object] = given) -> Callable[..., str]:
            def step(self: Engine) -> str:
                given.append(self)
                return original(self) + "!"

            return step

        patches.wrap_own(engine, "step", noted)
        patches.wrap_own(engine, "step", noted)
        assert engine.step() == "step!!"
        assert engine.step.__name__ == "step"
        assert given == [engine, engine]
        assert other.step() == "step"
        patches.restore()
        assert vars(engine) == ({} if own is None else {"step": own})


def test_what_another_tool_has_removed_stays_removed() -> None:
    engine, patches = Engine(), MethodPatches()
    patches.wrap(engine, "step", louder)
    del engine.step
    patches.restore()
    assert vars(engine) == {}

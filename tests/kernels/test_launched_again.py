"""A launch that is kept is for the very objects that it was checked with."""

from __future__ import annotations

from typing import Any

import torch

from canary_kernels.checks import keep_launch, launched_again


def test_nothing_is_launched_before_something_was_kept() -> None:
    assert not launched_again({}, "verify", torch.zeros(1))


def test_the_same_objects_launch_what_was_kept() -> None:
    cache: dict[Any, Any] = {}
    launches: list[str] = []
    plan, slots = object(), torch.zeros(2)
    keep_launch(cache, "compare", lambda: launches.append("first"), plan, slots)
    assert launches == []
    assert launched_again(cache, "compare", plan, slots)
    assert launched_again(cache, "compare", plan, slots)
    assert not launched_again(cache, "complete", plan, slots)
    assert launches == ["first", "first"]


def test_equal_objects_are_others() -> None:
    """An equal tensor lies elsewhere; a slice of the same memory may be longer."""
    cache: dict[Any, Any] = {}
    launches: list[str] = []
    plan, slots = object(), torch.zeros(2)
    keep_launch(cache, "compare", lambda: launches.append("first"), plan, slots)
    for others in ((plan, slots.clone()), (plan, slots[:1]), (object(), slots), (slots, plan)):
        assert not launched_again(cache, "compare", *others)
    assert launches == []
    keep_launch(cache, "compare", lambda: launches.append("second"), plan, slots[:1])
    assert not launched_again(cache, "compare", plan, slots)

"""Tables of a real vLLM's attention that are not its runner's, or cannot be compared with them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from canary_obs.vocabulary import State
from tests.engines.vllm.real.forwards import PATIENCE, acknowledge
from tests.engines.vllm.real.rig import Rig, prompts

NOT_COMPARED = "the slots that attention was given were not compared"
Change = Callable[[dict[str, Any]], Any]


@contextmanager
def given(rig: Rig, change: Change) -> Iterator[None]:
    """Attention gets what `change` makes of its metadata, {layer: metadata}."""
    runner = rig.runner
    owner, name = (
        (runner.model_state, "prepare_attn")
        if hasattr(runner, "model_state")
        else (runner, "_build_attention_metadata")
    )
    before, wrapped = getattr(owner, name), vars(owner).get(name)

    def build(*args: Any, **kwargs: Any) -> Any:
        made = built(*args, **kwargs)
        return change(made) if isinstance(made, dict) else (change(made[0]), *made[1:])

    # Where the canary has wrapped the method, the change comes before it sees the metadata.
    built = getattr(type(owner), name).__get__(owner) if wrapped is not None else before
    if wrapped is not None:
        cell = next(c for c in wrapped.__closure__ if callable(c.cell_contents) and c.cell_contents == built)
        cell.cell_contents = build
    else:
        setattr(owner, name, build)
    try:
        yield
    finally:
        if wrapped is not None:
            cell.cell_contents = built
        else:
            delattr(owner, name)


def parts(metadata: dict[str, Any]) -> list[tuple[Any, str]]:
    """Owners and names of all tables, each once."""
    found = {}
    for one in metadata.values():
        for owner in (one, getattr(one, "decode", None), getattr(one, "prefill", None)):
            if getattr(owner, "block_table", None) is not None:
                found[id(owner)] = (owner, "block_table")
    return list(found.values())


def copied(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same tables and mappings in other memory."""
    for owner, name in parts(metadata):
        setattr(owner, name, getattr(owner, name).clone())
    for one in {id(one): one for one in metadata.values()}.values():
        one.slot_mapping = one.slot_mapping.clone()
    return metadata


def exchanged(metadata: dict[str, Any]) -> dict[str, Any]:
    """The first two requests' rows."""
    for owner, name in parts(metadata):
        table = getattr(owner, name).clone()
        if len(table) > 1:
            table[[0, 1]] = table[[1, 0]]
        setattr(owner, name, table)
    return metadata


class Stale:
    """The tables of the step before the last change of a row's blocks."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def __call__(self, metadata: dict[str, Any]) -> dict[str, Any]:
        for number, (owner, name) in enumerate(parts(metadata)):
            table = getattr(owner, name)
            kept = self._kept.setdefault(number, table.clone())
            if kept.shape == table.shape:
                setattr(owner, name, kept)
        return metadata


def shifted(metadata: dict[str, Any]) -> dict[str, Any]:
    """A mapping that is one slot off."""
    for one in {id(one): one for one in metadata.values()}.values():
        one.slot_mapping = one.slot_mapping + 1
    return metadata


def accused(rig: Rig, change: Change, seed: int, steps: int) -> dict[str, Any]:
    """Reasons and groups of what is found while two requests run `steps` steps, and the state at the end."""
    draw = random.Random(seed)
    rig.fresh()
    acknowledge(rig)
    rig.generate(prompts(2, seed=seed), 2)  # leaves other blocks in the rows than the two will get
    own = {f"{name}{seed}": [draw.randrange(4, 1024) for _ in range(90)] for name in "ab"}
    rig.start(own, 60)
    rig.step(3)
    with given(rig, change):
        rig.step(steps)
    found = list(rig.settle())
    state, reasons = rig.canary.verdict()
    rig.finish()
    rig.found.clear()
    return {
        "reasons": sorted({violation.reason.value for violation in found}),
        "groups": sorted({violation.group for violation in found}),
        "state": str(state), "why": list(reasons),
    }  # fmt: skip


def tried(rig: Rig) -> dict[str, dict[str, Any]]:
    """By kind of change."""
    changes: dict[str, tuple[Change, int]] = {
        "copied": (copied, 4), "exchanged": (exchanged, 2), "stale": (Stale(), 12), "shifted": (shifted, 2),
    }  # fmt: skip
    found = {name: accused(rig, *change, seed) for seed, (name, change) in enumerate(changes.items(), 31)}
    rig.fresh()
    acknowledge(rig)
    return found


class Unreadable:
    """Metadata without a table, as a backend of another kind may have it."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        if name in ("decode", "prefill", "block_table") and _asked_by_canary():
            raise AttributeError(name)
        return getattr(self._metadata, name)


def _asked_by_canary() -> bool:
    import sys

    return sys._getframe(2).f_globals["__name__"].startswith("canary_obs")


def hide(metadata: dict[str, Any]) -> dict[str, Any]:
    return {layer: Unreadable(one) for layer, one in metadata.items()}


def unseen(rig: Rig, tokens: int = 3) -> dict[str, dict[str, Any]]:
    """Ways in which tables are not compared: the verdict and the seconds until it came."""
    tables = rig.adapter._attention

    @contextmanager
    def left_out() -> Iterator[None]:
        tables.given = lambda metadata, mappings, steps, total: steps  # type: ignore[method-assign]
        try:
            yield
        finally:
            del tables.given  # type: ignore[method-assign]

    ways = {
        "attention's tables are not compared": left_out,
        "attention's metadata shows no table": lambda: given(rig, hide),
    }
    report = {}
    for way, entered in ways.items():
        rig.fresh()
        acknowledge(rig)
        assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
        with entered():
            started = time.monotonic()
            rig.generate(prompts(2, seed=7), tokens)
            while (verdict := rig.canary.verdict())[0] is State.OK:
                assert time.monotonic() - started < PATIENCE, way
                time.sleep(0.01)
            seconds = time.monotonic() - started
        report[way] = {"state": str(verdict[0]), "reasons": list(verdict[1]), "seconds": seconds}
        found = [repr(violation) for violation in rig.settle()]
        assert found == []
        acknowledge(rig)
        assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
    return report

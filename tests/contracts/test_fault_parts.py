"""The parts under which faults are counted are those whose series exist at 0, on both sides."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from canary_obs.telemetry.service_readings import SERVICE_PARTS
from canary_obs.vocabulary import ObserverPart

PRODUCT = Path(__file__).parents[2] / "canary_obs"
# Functions whose first argument is the part, by their own name without leading underscores.
ENGINE_SIDE = frozenset({"guard", "caught", "fault", "count_fault"})
SERVICE_SIDE = frozenset({"fault", "open_log"})


def test_observer_parts_are_those_that_the_engine_side_counts() -> None:
    folders = (PRODUCT / "runtime", PRODUCT / "engines")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert set(parts_named_in(files, ENGINE_SIDE)) == set(ObserverPart)


def test_service_parts_are_those_that_the_service_counts() -> None:
    folders = (PRODUCT / "transport", PRODUCT / "hub", PRODUCT / "telemetry", PRODUCT / "service")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert set(parts_named_in([*files, PRODUCT / "serve.py"], SERVICE_SIDE)) == set(SERVICE_PARTS)


def parts_named_in(files: Iterable[Path], counting: frozenset[str]) -> Iterator[str]:
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and called(node) in counting:
                yield from value_of(node.args[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "guarded":
                yield from value_of(node.args[1])  # after the observer
            elif isinstance(node, ast.keyword) and node.arg == "observer_faults":
                keys = node.value.keys if isinstance(node.value, ast.Dict) else ()
                yield from (value for key in keys if key is not None for value in value_of(key))


def called(call: ast.Call) -> str:
    """`guard` of `self._faults.guard(...)` and of `self._guard(...)`."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.lstrip("_")


def value_of(node: ast.expr) -> Iterator[str]:
    """The value of a string literal or of `ObserverPart.NAME`; nothing for a variable."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("ObserverPart"):
        yield ObserverPart[node.attr].value

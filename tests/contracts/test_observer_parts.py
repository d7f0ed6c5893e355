"""Every part under which the engine's side counts a fault is a member of ObserverPart, and none is unused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from canary_obs.vocabulary import ObserverPart

PRODUCT = Path(__file__).parents[2] / "canary_obs"
# Functions whose first argument is the part, by their own name without leading underscores.
COUNTING = frozenset({"guard", "met", "fault", "count_fault"})


def test_every_part_that_the_source_names_is_known_and_used() -> None:
    assert {part for folder in ("runtime", "engines") for part in parts_named_in(PRODUCT / folder)} == set(
        ObserverPart
    )


def parts_named_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and called(node) in COUNTING:
                yield from value_of(node.args[0])
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

"""How much of a heavy test the everyday suite runs, and whose turn it is to run whole in `make test-slow`."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
WHOLE = "CANARY_TESTS_WHOLE"  # the environment variable that asks for it
BY_TURN = "turn"  # its value for whole tests, of which each commit runs its share; any other: all of them
TURNS = 3  # of as many commits, which together run everything


def sized(whole: _T, everyday: _T) -> _T:
    """Examples, steps or cases of a test."""
    return whole if os.environ.get(WHOLE) else everyday


def of_turn(everything: Sequence[_T], turn: int | None) -> list[_T]:
    """Those whose turn it is; None = all. Neighbours, which often take equally long, have different turns."""
    return list(everything if turn is None else everything[turn::TURNS])


def turn() -> int | None:
    """By the commit, so that a run is repeated as it was: CI has an hour, .ci/nightly runs everything."""
    git = "git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout[:8]
    everything = (os.environ.get(WHOLE) or BY_TURN) != BY_TURN
    return None if everything or not commit else int(commit, 16) % TURNS


def sized_names(source: str) -> set[str]:
    """What a module defines that depends on `sized`, directly or over other names and fixtures of its own."""
    uses: dict[str, set[str]] = {}
    for statement in ast.parse(source).body:
        inside = list(ast.walk(statement))
        used = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        used |= {node.arg for node in inside if isinstance(node, ast.arg)}
        for name in _defined(statement):
            uses.setdefault(name, set()).update(used)
    found = {sized.__name__}
    while more := {name for name, used in uses.items() if used & found} - found:
        found |= more
    return found - {sized.__name__}


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }

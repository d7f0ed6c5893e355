"""How much of a heavy test the everyday suite runs; `make test-slow` runs the whole of it."""

from __future__ import annotations

import ast
import os
from typing import TypeVar

_T = TypeVar("_T")
WHOLE = "CANARY_TESTS_WHOLE"  # the environment variable that asks for it


def sized(whole: _T, everyday: _T) -> _T:
    """Examples, steps or cases of a test."""
    return whole if os.environ.get(WHOLE) else everyday


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

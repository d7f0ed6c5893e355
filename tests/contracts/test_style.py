"""Sizes that keep the code readable: files, functions, parameters, docstrings, packages."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for folder in ("canary_obs", "kernels/canary_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@cache
def nodes() -> tuple[tuple[Path, Documented], ...]:
    return tuple(
        (path, node)
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Documented)
    )


@cache
def functions() -> tuple[tuple[Path, Function], ...]:
    return tuple((path, node) for path, node in nodes() if isinstance(node, Function))


def test_files_are_short() -> None:
    assert [path for path, text in SOURCES.items() if text.count("\n") > 300] == []


def test_functions_are_short() -> None:
    long = [
        f"{path}:{node.name}"
        for path, node in functions()
        if (node.end_lineno or node.lineno) - node.lineno >= 60
    ]
    assert len(long) <= 0.02 * len(functions()), long


def test_few_functions_take_eight_parameters() -> None:
    def wide(kernels: bool) -> tuple[int, int]:
        mine = [node for path, node in functions() if (path.parts[0] == "kernels") is kernels]
        counts = [
            sum(a.arg not in ("self", "cls") for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs))
            for f in mine
        ]
        return sum(count >= 8 for count in counts), len(mine)

    (host, of_host), (kernel, of_kernels) = wide(False), wide(True)
    assert host <= 0.03 * of_host
    assert kernel <= 0.15 * of_kernels


def test_docstrings_are_short() -> None:
    long = [
        f"{path}:{getattr(node, 'name', 'module')}"
        for path, node in nodes()
        if (ast.get_docstring(node, clean=False) or "").count("\n") >= 12
    ]
    assert long == []


def test_no_package_holds_more_than_a_fifth() -> None:
    """Each adapter is a package: none of them may import another."""
    lines: Counter[str] = Counter()
    for path, text in SOURCES.items():
        depth = 3 if "engines" in path.parts[:-2] else 2
        package = ".".join(path.parts[:depth]) if len(path.parts) > 2 else path.parts[0]
        lines[package] += text.count("\n")
    package, most = lines.most_common(1)[0]
    assert most <= 0.2 * lines.total(), package

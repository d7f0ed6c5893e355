"""docs/fault_cases.md out of the specimens: `python -m tests.fault_cases.table > docs/fault_cases.md`."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

from tests.fault_cases import cases as case_modules
from tests.fault_cases.case import FaultCase
from tests.fault_cases.connectors import FAULTS
from tests.fault_cases.engines import RUNS
from tests.fault_cases.transfers import TRANSFERS

_HEAD = """# Fault cases

Each row is a class of KV cache fault that users have reported, or that hardware produces. It is one file in
`tests/fault_cases/cases`: the engine itself is changed where the bug lived (never the canary's records) and
runs under traffic with eviction, preemption, aborts and shared prefixes. The first step with violations must
show exactly these reasons, this many steps after the fault took effect (0 = in the same forward, -1 = before
it: bytes that arrive with their records are compared at once). The same run without the fault has no
violation, and its outputs differ: the fault matters.

Settings are those of CI: `prefix_data` compares all bytes that a forward has read, right after it; a sweep
every 10 steps covers the rest. The column *at production defaults* is the same fault with nothing set, run
by `python -m tests.fault_cases.production`: bytes are compared when they arrive, when they are copied and
before a slot is overwritten, not when a prefix is read (`prefix_data` and `verify_on_hit` are off); no sweep
runs while requests do, and the patrol has 1 % of the time. An engine step takes 20 ms.

Made by `python -m tests.fault_cases.table > docs/fault_cases.md`; reports are the public threads that were
read for a class.
"""

_ENGINES = """
## On which engines

All {classes} classes run on the reference engine on a CPU, and the {transfers} between processes on two
reference engines. {vllm} of them also run on a real vLLM and {sglang} on a real SGLang, on a CPU, where the
fault is planted in the engine's own tensors, tables and methods; the others were not run there. On a GPU the
reference engine gets one fault of each reason (`tests/gpu/test_faults.py`), and vLLM flipped bits in every
layer (`canary-obs bench vllm-gpu`).
"""
_CONNECTORS = """
## On vLLM's KV connectors

Planted in real vLLM engines on a CPU, in the connector's own files, memory or transfer, never in the records
(but for the last three). *Unverified* slots are counted as such, never as ok; tests are in
`tests/engines/vllm/real` unless a path is given. CI runs them with vLLM's V1 model runner, and with V2
where it says so; by hand, all of `test_offloading.py`, `test_lmcache.py`, `test_failed_loads.py` and
`test_connectors.py` passed on V2 (vLLM 0.32, 2026-11-26).

| fault | connector | what is found | test | CI |
|---|---|---|---|---|"""
PRODUCTION = Path(__file__).with_name("production.json")  # written by tests.fault_cases.production


def collected() -> dict[str, FaultCase]:
    """Every specimen by the name of its file, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(case_modules.__path__))
    return {name: importlib.import_module(f"{case_modules.__name__}.{name}").FAULT_CASE for name in names}


def table() -> str:
    """The page."""
    names = {case.title: name for name, case in collected().items()}
    cases = sorted(collected().values(), key=lambda case: (case.place, case.title))
    seen = [case for case in cases if not case.missed]
    missed = [case for case in cases if case.missed]
    lines = [_HEAD, f"## Caught: {len(seen)} classes\n"]
    lines += [
        "| fault | where | first signal | steps | at production defaults | what else notices | reports |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| **{s.title}**: {s.story} | {s.place} | {'; '.join(s.finds)} | {s.latency} "
        f"| {_in_production(names[s.title])} | {s.elsewhere} | {_links(s.reports)} |"
        for s in seen
    ]
    lines += [f"\n## Caught between processes: {len(TRANSFERS)} classes\n"]
    lines += ["A prefill and a decode process joined by gloo; all before the request's first forward.\n"]
    lines += ["| fault | first signal | reports |", "|---|---|---|"]
    lines += [f"| **{t.title}**: {t.story} | {'; '.join(t.finds)} | {_links(t.reports)} |" for t in TRANSFERS]
    if missed:
        lines += [f"\n## Not caught: {len(missed)} classes\n"]
        lines += ["| fault | where | why not | what else notices | reports |", "|---|---|---|---|---|"]
        lines += [
            f"| **{s.title}**: {s.story} | {s.place} | {s.missed} | {s.elsewhere} | {_links(s.reports)} |"
            for s in missed
        ]
    harmless = [s for s in (*cases, *TRANSFERS) if s.harmless]
    if harmless:
        lines += ["\nOutputs stay as they were, yet it is a fault:\n"]
        lines += [f"- {s.title}: {s.harmless}" for s in harmless]
    return "\n".join(lines + _on_engines() + _on_connectors()) + "\n"


def _on_engines() -> list[str]:
    cases = collected()
    vllm, sglang = ({run.case for run in RUNS if run.engine.startswith(name)} for name in ("vLLM", "SGLang"))
    rows = sorted((cases[run.case].title, run.engine, run.test) for run in RUNS)
    return [
        _ENGINES.format(classes=len(cases), transfers=len(TRANSFERS), vllm=len(vllm), sglang=len(sglang)),
        "| fault | engine | test |",
        "|---|---|---|",
        *(f"| {title} | {engine} | `{test}` |" for title, engine, test in rows),
    ]


def _on_connectors() -> list[str]:
    return [
        _CONNECTORS,
        *(
            f"| {fault} | {connector} | {planted.found} | {f'`{planted.test}`' if planted.test else ''} "
            f"| {planted.runs} |"
            for fault, by_connector in FAULTS.items()
            for connector, planted in by_connector.items()
        ),
    ]


def _in_production(name: str) -> str:
    shown = json.loads(PRODUCTION.read_text(encoding="utf-8"))[name]
    return f"{'; '.join(shown['signal'])}; {shown['after']}" if shown["signal"] else "**not seen**"


def _links(reports: tuple[str, ...]) -> str:
    parts = [report.removeprefix("https://github.com/").split("/") for report in reports]
    return ", ".join(f"[{p[1]}#{p[3]}]({r})" for p, r in zip(parts, reports, strict=True)) or "hardware"


if __name__ == "__main__":
    print(table(), end="")

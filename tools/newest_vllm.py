"""Tries a vLLM release that nobody has tested yet, and reports what a new adapter would have to do.

    python tools/newest_vllm.py report.json                  the newest release of the package index
    python tools/newest_vllm.py report.json --source FOLDER  sources that are there, like site-packages
    python tools/newest_vllm.py report.json --run PYTHON     the suite, too, with this interpreter's vLLM

Sources are read, not imported: neither a GPU nor vLLM's dependencies are needed. Exits with 1 when a method
that is wrapped is missing or takes other parameters, a field that is read is missing, or the suite fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canary_obs.engines.vllm.drafters import KNOWN_DRAFTERS
from canary_obs.engines.vllm.groups import COVERED_SPECS
from canary_obs.engines.vllm.versions import FIELDS, HOOKS, RUNNER_HOOKS, V1_VERSIONS

ROOT = Path(__file__).parents[1]
_SPECS = "vllm/v1/kv_cache_interface.py"
_DRAFTERS = ("vllm/v1/spec_decode", "vllm/v1/worker/gpu/spec_decode")
_SUITE_SECONDS = 3600


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--source", type=Path, help="folder with vLLM's sources instead of a download")
    parser.add_argument("--version", help="release to download instead of the newest")
    parser.add_argument("--run", help="Python interpreter with vLLM and canary_obs, to run the suite with")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="newest-vllm") as folder:
        source = given.source or download(given.version, Path(folder))
        report = {"tested": list(V1_VERSIONS), "version": version_of(source), **read(source)}
    report["suite"] = run_suite(given.run) if given.run else None
    given.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(summary(report))
    changed = report["differing"] or report["fields_missing"]
    return int(bool(changed) or (report["suite"] or {}).get("status", 0) != 0)


def download(version: str | None, folder: Path) -> Path:
    """The Python files of a release's wheel, the newest by default. Raises CalledProcessError."""
    wanted = f"vllm=={version}" if version else "vllm"
    command = [sys.executable, "-m", "pip", "download", wanted, "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--quiet", "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.endswith((".py", "METADATA"))])
    wheel.unlink()
    return folder


def version_of(source: Path) -> str | None:
    """By the metadata next to the package; None = there is none."""
    for metadata in sorted(source.glob("vllm*.dist-info/METADATA")):
        for line in metadata.read_text("utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return None


def read(source: Path) -> dict[str, Any]:
    """What differs from the versions tested: methods, kinds of KV cache groups, drafters."""
    differing = [
        {"method": f"{path}.{method}", "expected": list(wanted), "found": found}
        for hooks in (HOOKS, RUNNER_HOOKS)
        for path, methods in hooks.items()
        for method, wanted in methods.items()
        if (found := parameters(source, path, method)) is None or found[: len(wanted)] != list(wanted)
    ]
    missing = [
        {"class": path, "fields": gone}
        for path, wanted in FIELDS.items()
        if (gone := sorted(wanted - fields(source, path)))
    ]
    specs = {found.name for found in classes(source / _SPECS) if found.name.endswith("Spec")}
    drafters = {
        found.name
        for folder in _DRAFTERS
        for file in (source / folder).rglob("*.py")
        for found in classes(file)
        if found.name.endswith(("Proposer", "Speculator"))
    }
    return {
        "differing": differing,
        "fields_missing": missing,
        "groups_left_out": sorted(specs - COVERED_SPECS),
        "drafters_not_checked": sorted(drafters - KNOWN_DRAFTERS),
        "drafters_gone": sorted(KNOWN_DRAFTERS - drafters),
    }


def parameters(source: Path, path: str, method: str) -> list[str] | None:
    """Parameters after self of a method of `module:class` or of a base in its module; None = missing."""
    module, name = path.split(":")
    known = {found.name: found for found in classes(source / f"{module.replace('.', '/')}.py")}
    while name in known:
        for item in known[name].body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == method:
                return [one.arg for one in [*item.args.posonlyargs, *item.args.args][1:]]
        name = next((base.id for base in known[name].bases if isinstance(base, ast.Name)), "")
    return None


def fields(source: Path, path: str) -> set[str]:
    """Fields, properties and methods in the body of `module:class`; empty if there is no such class."""
    module, name = path.split(":")
    found: set[str] = set()
    for one in classes(source / f"{module.replace('.', '/')}.py"):
        if one.name == name:
            for item in one.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found.add(item.target.id)
                elif isinstance(item, ast.FunctionDef):
                    found.add(item.name)
    return found


def classes(file: Path) -> Iterator[ast.ClassDef]:
    """The classes of a module; none if there is no such file."""
    if file.exists():
        yield from (
            item for item in ast.parse(file.read_text("utf-8")).body if isinstance(item, ast.ClassDef)
        )


def run_suite(python: str) -> dict[str, Any]:
    """Run tests/engines/vllm; a version that is not tested is attached to, rehearsed and called degraded."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-o",
        "filterwarnings=",
        "-p",
        "no:cacheprovider",
        "tests/engines/vllm",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_SUITE_SECONDS
    )
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "failed": failed, "last": lines[-1] if lines else ""}


def summary(report: dict[str, Any]) -> str:
    """A few lines for a log."""
    lines = [f"vLLM {report['version']}: tested are {', '.join(report['tested'])}"]
    lines += [
        f"  {found['method']} takes {found['found']}, expected {found['expected']} first"
        for found in report["differing"]
    ]
    lines += [f"  {found['class']} has no {', '.join(found['fields'])}" for found in report["fields_missing"]]
    lines += [
        f"  {key.replace('_', ' ')}: {', '.join(report[key]) or 'none'}"
        for key in ("groups_left_out", "drafters_not_checked", "drafters_gone")
    ]
    if report["suite"] is not None:
        lines.append(f"  suite: {report['suite']['last']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

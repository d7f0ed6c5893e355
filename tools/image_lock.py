"""Pins what the service's image installs, each wheel by its hash: `make image-lock`.

Asks pip which wheels it would install on each platform, and PyPI's index for their hashes. Needs the network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "docker/service/requirements.lock"
PYTHON = "3.11"  # of the image, whose libc is Debian 12's: 2.36
TAGS = ("manylinux_2_36", "manylinux_2_28", "manylinux_2_26", "manylinux_2_17", "manylinux2014")
MACHINES = ("x86_64", "aarch64")
HEADER = """\
# What the image of the service installs: the versions of constraints.txt, and setuptools to build canary_obs.
# Made by `make image-lock`, after each change of constraints.txt. Hashes are those of the wheels of CPython
# 3.11 for Linux on x86_64 and aarch64.
"""


def requirements() -> list[str]:
    """What the image needs, as pyproject.toml has it."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = content["project"]
    return [
        *project["dependencies"],
        *project["optional-dependencies"]["serve"],
        *content["build-system"]["requires"],
    ]


def lock(reports: Iterable[dict[str, Any]]) -> str:
    """The lock file of these reports of pip, one for each platform. Raises ValueError when they disagree."""
    versions: dict[str, str] = {}
    hashes: dict[str, set[str]] = {}
    for report in reports:
        for item in report["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            version, source = item["metadata"]["version"], item["download_info"]
            if versions.setdefault(name, version) != version:
                raise ValueError(f"{name}: {versions[name]} on one platform, {version} on another")
            if not source["url"].startswith("https://files.pythonhosted.org/"):
                raise ValueError(f"{name}: {source['url']} is not PyPI's; unset pip's other sources")
            hashes.setdefault(name, set()).add(source["archive_info"]["hashes"]["sha256"])
    lines = [
        f"{name}=={versions[name]} \\\n"
        + " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(hashes[name]))
        for name in sorted(versions)
    ]
    return HEADER + "\n".join(lines) + "\n"


def ask_pip(machine: str) -> dict[str, Any]:
    """Pip's report on what it would install for this kind of machine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        platforms = [f"--platform={tag}_{machine}" for tag in TAGS]
        command = ["install", "--quiet", "--dry-run", "--ignore-installed", f"--target={folder}/target"]
        command += ["--only-binary=:all:", "--index-url=https://pypi.org/simple", *platforms]
        command += [f"--python-version={PYTHON}", f"--constraint={ROOT / 'constraints.txt'}"]
        command += [f"--report={report}", *requirements()]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        content: dict[str, Any] = json.loads(report.read_text("utf-8"))
        return content


if __name__ == "__main__":
    LOCK.write_text(lock(ask_pip(machine) for machine in MACHINES), "utf-8")

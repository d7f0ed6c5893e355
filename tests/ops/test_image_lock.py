"""The service's image installs what was tried, each wheel by its hash, and nothing else."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.ops.tools import ROOT
from tools.image_lock import HEADER, LOCK, lock, requirements

DOCKERFILE = ROOT / "docker/service/Dockerfile"
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, list[str]]]:
    text = LOCK.read_text("utf-8").removeprefix(HEADER)
    assert _ENTRY.sub("", text) == ""  # a line without a hash would be left
    return {
        entry["name"]: (entry["version"], re.findall(r"sha256:(\w+)", entry["hashes"]))
        for entry in _ENTRY.finditer(text)
    }


def needed() -> set[str]:
    """Everything that the requirements need in turn, as the packages installed here say."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements()]
    while waiting:
        wanted = waiting.pop()
        if plain(wanted.name) in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(plain(wanted.name))
        if wanted.name != "setuptools":  # of the build alone; not installed everywhere, and it needs nothing
            waiting += [Requirement(text) for text in metadata.requires(wanted.name) or ()]
    return found


def test_the_lock_has_all_that_is_needed_and_no_more() -> None:
    assert set(locked()) == needed()


def test_the_lock_has_the_versions_that_were_tried() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line)
    tried = {plain(name): version for name, version in tried.items()}
    versions = {name: version for name, (version, _) in locked().items()}
    del versions["setuptools"]
    assert versions == {name: tried[name] for name in versions}


def test_wheels_with_machine_code_are_locked_for_both_machines() -> None:
    counts = {name: len(set(hashes)) for name, (_, hashes) in locked().items()}
    compiled = {"charset-normalizer", "grpcio", "msgspec", "protobuf", "pydantic-core", "pyzmq"}
    assert {name for name, count in counts.items() if count == 2} == compiled
    assert set(counts.values()) == {1, 2}


def test_the_image_installs_nothing_without_a_hash() -> None:
    text = DOCKERFILE.read_text("utf-8").replace("\\\n", "")
    installs = re.findall(r"pip install[^&\n]*", text)
    assert len(installs) == 2
    assert "--require-hashes" in installs[0]
    assert "--only-binary=:all:" in installs[0]
    assert "-r requirements.lock" in installs[0]
    assert {"--no-index", "--no-deps", "--no-build-isolation", "."} <= set(installs[1].split())
    assert "!docker/service/requirements.lock" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()


def item(name: str, version: str, digest: str, host: str = "https://files.pythonhosted.org") -> dict:
    source = {"url": f"{host}/{name}.whl", "archive_info": {"hashes": {"sha256": digest * 64}}}
    return {"metadata": {"name": name, "version": version}, "download_info": source}


def test_the_hashes_of_all_platforms_are_joined() -> None:
    one = {"install": [item("b_c", "2", "1"), item("A", "1", "3")]}
    two = {"install": [item("b_c", "2", "0"), item("A", "1", "3")]}
    assert lock([one, two]) == HEADER + (
        f"a==1 \\\n    --hash=sha256:{'3' * 64}\n"
        f"b-c==2 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n"
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (item("a", "2", "1"), "a: 1 on one platform, 2 on another"),
        (item("b", "2", "1", "file:///opt/wheels"), "is not PyPI's"),
    ],
)
def test_a_report_that_cannot_be_trusted_is_refused(other: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        lock([{"install": [item("a", "1", "1")]}, {"install": [other]}])

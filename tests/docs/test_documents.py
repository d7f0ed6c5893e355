"""What the documents name exists: files, modules, classes, commands, settings, routes, models."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import typer
from typer.main import get_command

import canary_obs
from canary_obs.cli import app
from canary_obs.config import CanaryConfig, ServiceConfig
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import StepView
from canary_obs.hub.hub import Hub
from canary_obs.reference_engine.settings import MODELS
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.service.app import create_app
from canary_obs.vocabulary import Mode, PerturbMode, State

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HISTORY = "CHANGELOG.md"  # also names what is gone
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "tests/gpu/README.md")
    for path in ROOT.glob(pattern)
    if path.name not in ("metrics.md", "fault_cases.md", "replays.md")  # generated
)
_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]+)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(r"(?:canary-obs|-m canary_obs) ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?((?: [^`|#\n;]*)?)")
_MODULE = re.compile(r"\bcanary_(?:obs|kernels)(?:\.[A-Za-z_]\w*)+")
_CLASS = re.compile(r"[A-Z][a-z0-9]+[A-Z]\w*")


def text_of(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


def first_cells(file: str, title: str) -> list[str]:
    """Names in backticks in the first column of the first table under a title."""
    under = text_of(file).split(f"# {title}\n", 1)[1].split("\n#", 1)[0]
    table = under[under.index("|") :].split("\n\n", 1)[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


@pytest.mark.parametrize("file", FILES)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(file: str) -> None:
    for target, anchor in _LINK.findall(text_of(file)):
        if target.startswith(("http:", "https:")):
            continue
        path = (ROOT / file).parent / target
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}


@pytest.mark.parametrize("file", [file for file in FILES if file != HISTORY])
def test_every_path_exists(file: str) -> None:
    for code in _CODE.findall(text_of(file)):
        head, slash, _ = code.partition("/")
        if slash and head in _FOLDERS and re.fullmatch(r"[\w./*-]+", code):
            assert list(ROOT.glob(code)), code


@pytest.mark.parametrize("file", [file for file in FILES if file != HISTORY])
def test_every_module_exists(file: str) -> None:
    for name in _MODULE.findall(text_of(file)):
        if name == "canary_obs.swa_divergence":  # a logger
            continue
        module, _, attribute = name.rpartition(".")
        if importlib.util.find_spec(module) is None or importlib.util.find_spec(name) is None:
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.fixture(scope="module")
def product() -> str:
    """Every module of the product in one text."""
    folders = ("canary_obs", "kernels", "examples")
    return "\n".join(path.read_text("utf-8") for name in folders for path in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize("file", [file for file in FILES if file != HISTORY])
def test_every_class_exists(file: str, product: str) -> None:
    alerts = {path.stem for path in (ROOT / "alerts/runbooks").glob("*.md")}
    for name in {code for code in _CODE.findall(text_of(file)) if _CLASS.fullmatch(code)} - alerts:
        assert re.search(rf"^ *class {name}\b", product, re.MULTILINE), name


@pytest.mark.parametrize("file", FILES)
def test_every_command_and_option_exists(file: str) -> None:
    known = get_command(app)
    assert isinstance(known, typer.core.TyperGroup)
    for name, below, arguments in _COMMAND.findall(text_of(file)):
        command = known.commands.get(name)
        assert command is not None, name
        options = {flag for parameter in command.params for flag in parameter.opts}
        if isinstance(command, typer.core.TyperGroup) and below:
            assert below in command.commands, f"{name} {below}"
            options = {
                flag
                for parameter in command.commands[below].params
                for flag in (*parameter.opts, *parameter.secondary_opts)
            }
        assert set(re.findall(r"--[a-z][a-z-]*", arguments)) - options == set(), name


@pytest.mark.parametrize("file", FILES)
def test_every_make_target_exists(file: str) -> None:
    makefile = text_of("Makefile")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text_of(file), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("title", "kind"),
    [("Settings of the engine process", CanaryConfig), ("Settings of the service process", ServiceConfig)],
)
def test_every_setting_is_described(title: str, kind: type[msgspec.Struct]) -> None:
    named = first_cells("docs/configuration.md", title)
    assert sorted(named) == sorted(kind.__struct_fields__)


def test_vocabularies_are_described_completely() -> None:
    assert sorted(first_cells("docs/configuration.md", "Modes")) == sorted(map(str, Mode))
    assert sorted(first_cells("docs/configuration.md", "States")) == sorted(map(str, State))
    assert sorted(first_cells("docs/configuration.md", "Fault injection")) == sorted(map(str, PerturbMode))
    assert sorted(first_cells("docs/reference_engine.md", "Kinds of KV caches")) == sorted(MODELS)
    events = first_cells("docs/service.md", "Event stream")
    source = text_of("canary_obs/service/event_stream.py")
    assert all(f'"{event}"' in source for event in events)


def test_every_route_is_described_with_its_scope() -> None:
    document = create_app(Hub()).openapi()
    actual = {
        (f"{method.upper()} {path}", operation["x-kv-canary-scope"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    } | {("GET /openapi.json", "read")}
    under = text_of("docs/service.md").split("# HTTP API\n", 1)[1].split("\n#", 1)[0]
    described = set()
    for line in [line for line in under.splitlines() if line.startswith("|")][2:]:
        routes, scope = line.split("|")[1:3]
        described |= {(route, scope.strip(" `")) for route in re.findall(r"`([^`]+)`", routes)}
    assert described == actual


def test_the_contract_is_described_as_it_is() -> None:
    text = text_of("docs/adapters.md")
    for call in re.findall(r"`observer\.(\w+)\(", text):
        assert callable(getattr(Observer, call)), call
    described = set(first_cells("docs/adapters.md", "2. Show each forward: `StepView`"))
    assert described == {field.name for field in fields(StepView)}


def test_the_python_api_is_described_completely() -> None:
    named = first_cells("docs/python_api.md", "Python API")
    assert sorted(named) == sorted(canary_obs.__all__)
    for method in re.findall(r"^\| `(\w+)\(\)`", text_of("docs/python_api.md"), re.MULTILINE):
        assert callable(getattr(CanaryRuntime, method)), method


def test_every_package_is_in_the_layout() -> None:
    packages = {path.parent.name for path in (ROOT / "canary_obs").glob("*/__init__.py")}
    named = {name.removeprefix("canary_obs/") for name in first_cells("CONTRIBUTING.md", "Layout")}
    assert packages - named == set()

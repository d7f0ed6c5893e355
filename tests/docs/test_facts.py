"""Defaults, figures, paths and variables in the documents are those of the code."""

from __future__ import annotations

import ast
import re
from types import ModuleType

import msgspec
import pytest

from canary_obs import records
from canary_obs.config import CanaryConfig, ServiceConfig
from canary_obs.engine_api.observer import Observer
from canary_obs.hub import rank_table
from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.runtime import check_coverage, health
from canary_obs.runtime.device import findings
from canary_obs.runtime.report import finding_log, reporter
from canary_obs.service import connections, event_stream
from canary_obs.service.app import create_app
from canary_obs.service.routes import events
from canary_obs.telemetry import metric_export
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from tests.docs.test_documents import ROOT, first_cells, text_of
from tests.service.fakes import counters, hello, identity, snapshot, violation

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "SECURITY.md", "docs/*.md", "alerts/runbooks/*.md")
    for path in ROOT.glob(pattern)
)
# Of other programs; OpenTelemetry's are looked up in the package.
FOREIGN = {
    "NUMBA_CACHE_DIR", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_SERVER_DEV_MODE", "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_SAMPLER", "XDG_RUNTIME_DIR",
}  # fmt: skip
# Documents say what is, not what was; docs/measurements.md compares commits.
HISTORY = re.compile(r"\b(today|formerly|used to be|in earlier versions|was renamed|since version)\b", re.I)


def is_default(text: str, value: object) -> bool:
    """Whether a text in backticks is a value as users write it."""
    if isinstance(value, bool):
        return text == str(value).lower()
    return float(text) == value if isinstance(value, float) else text == str(value)


@pytest.mark.parametrize(
    ("title", "kind", "least"),
    [
        ("Settings of the engine process", CanaryConfig, 26),
        ("Settings of the service process", ServiceConfig, 11),
    ],
)
def test_every_default_is_that_of_the_code(title: str, kind: type[msgspec.Struct], least: int) -> None:
    under = text_of("docs/configuration.md").split(f"# {title}\n", 1)[1].split("\n#", 1)[0]
    checked = 0
    for line in [line for line in under.splitlines() if re.match(r"\| `(?!OTEL_)", line)]:
        names, said = line.split("|")[1:3]
        settings, shown = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", said)
        if settings[:1] == ["engine"]:  # described in words
            settings = settings[1:]
        shown = shown * len(settings) if len(shown) == 1 else shown
        for setting, text in zip(settings, shown, strict=bool(shown)):
            value = getattr(kind(), setting)
            if value is not None:
                assert is_default(text, value), (setting, text, value)
                checked += 1
    assert checked >= least


def figure(module: ModuleType, name: str) -> str:
    return f"{getattr(module, name):g}"


@pytest.mark.parametrize(
    ("file", "sentence", "module", "name"),
    [
        ("docs/service.md", "At most {} streams can be open", events, "STREAMS_MAX"),
        ("docs/service.md", "The last {} violations and", event_stream, "EVENTS_KEPT"),
        ("docs/service.md", "at most {} s late", event_stream, "POLL_SECONDS"),
        ("docs/findings.md", "the latest {} findings", findings, "_REMEMBERED"),
        ("docs/findings.md", "(the latest {})", reporter, "BACKLOG"),
        ("docs/findings.md", "in requests of {} points", metric_export, "POINTS_PER_REQUEST"),
        ("docs/architecture.md", "(at most {}) are sent again", reporter, "BACKLOG"),
        ("docs/findings.md", "At most {} lines are written", finding_log, "_LINES"),
        ("docs/findings.md", "lines are written in {} s", finding_log, "_SECONDS"),
        ("docs/architecture.md", "counters older than {} s", health, "PIPELINE_STALE_SECONDS"),
        ("docs/checks.md", "of those of the last {} s", check_coverage, "WINDOW_SECONDS"),
        ("SECURITY.md", "without a request are closed after {} s", connections, "REQUEST_SECONDS"),
        ("CHANGELOG.md", "does not report within {} s", rank_table, "MISSING_SECONDS"),
    ],
)  # fmt: skip
def test_every_figure_is_that_of_the_code(file: str, sentence: str, module: ModuleType, name: str) -> None:
    assert sentence.format(figure(module, name)) in " ".join(text_of(file).split())


@pytest.fixture(scope="module")
def routes() -> list[re.Pattern[str]]:
    routed = [*create_app(Hub()).openapi()["paths"], "/openapi.json"]
    return [re.compile(re.sub(r"\{\w+\}", r"[^/]+", path) + r"\Z") for path in routed]


@pytest.mark.parametrize("file", FILES)
def test_every_http_path_is_routed(file: str, routes: list[re.Pattern[str]]) -> None:
    for path in re.findall(r"(/canary/[\w/{}-]+|/metrics|/healthz|/readyz)\b", text_of(file)):
        assert any(route.match(path) for route in routes), path


@pytest.mark.parametrize("file", FILES)
def test_every_variable_of_others_exists(file: str) -> None:
    from opentelemetry import environment_variables as of_api
    from opentelemetry.sdk import environment_variables as of_sdk

    known = set(vars(of_api)) | set(vars(of_sdk)) | FOREIGN
    named = set(re.findall(r"\b(?:OTEL|NUMBA|VLLM|XDG)_[A-Z_]*[A-Z]\b", text_of(file)))
    assert named - known == set()


@pytest.mark.parametrize("file", FILES)
def test_documents_tell_no_history(file: str) -> None:
    assert HISTORY.findall(text_of(file)) == []


def test_the_adapter_that_is_walked_through_has_as_many_lines_as_said() -> None:
    (toy,) = [
        node
        for node in ast.parse(text_of("examples/own_engine.py")).body
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    lines = toy.end_lineno - toy.lineno + 1
    for file in ("README.md", "CONTRIBUTING.md", "docs/adapters.md"):
        assert re.search(rf"(?:one|adapter) (?:of|in) {lines} lines", text_of(file)), file


def test_every_message_is_named() -> None:
    text = (
        text_of("docs/architecture.md").split("- Engine to service: ", 1)[1].split("All of them are in", 1)[0]
    )
    tagged = {
        kind.__name__
        for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag
    }
    assert set(re.findall(r"`([A-Z]\w+)`", text)) - {"KV_CANARY_SNAPSHOT_SECONDS"} == tagged


def test_the_number_of_series_is_about_what_is_said() -> None:
    def series(*groups: str) -> int:
        hub = Hub()
        hub.ingest(hello(identity()), lambda command: None)
        counted = {group: counters(3) for group in groups}
        plain = {"swa_divergence": None, "perturbations": {}}  # what most ranks have
        hub.ingest(snapshot(identity(), 3, groups=counted, **plain), lambda command: None)
        page, _ = Exposition(HubCollector(hub)).page("")
        return sum('rank="' in line for line in page.decode().splitlines())

    said = re.search(r"about (\d+) series, and (\d+) more for each group", text_of("docs/production.md"))
    assert said
    each = series("full", "swa") - series("full")
    assert abs(int(said[2]) - each) <= 10
    assert abs(int(said[1]) - (series("full") - each)) <= 10


def test_exemplars_are_in_open_metrics_only_and_lead_where_the_page_says() -> None:
    hub = Hub()
    me = identity()
    hub.ingest(hello(me), lambda command: None)
    hub.ingest(Violations(identity=me, rows=(violation(),)), lambda command: None)
    counted = {"full": counters(3, violations=1)}
    hub.ingest(snapshot(me, 3, violations=1, groups=counted), lambda command: None)
    exposition = Exposition(HubCollector(hub))
    accept = re.search(r"-H 'Accept: ([^']+)'", text_of("docs/findings.md"))
    assert accept
    page = exposition.page(accept[1])[0].decode()
    shown = re.findall(r"^kv_canary_violations_total\{.*\} 1\.0 # \{(.*)\} 1\.0 ", page, re.M)
    labels = dict(re.findall(r'(\w+)="([^"]+)"', shown[0]))
    assert sorted(labels) == sorted(first_cells("docs/findings.md", "Exemplars"))
    assert hub.incidents.find(labels["incident_id"]) is not None
    assert b" # {" not in exposition.page("text/plain")[0]


def test_every_announcement_is_in_the_guide_to_adapters() -> None:
    named = set(re.findall(r"`observer\.(\w+)\(", text_of("docs/adapters.md")))
    others = {
        "adoptions",
        "before_write",
        "compares_hits",
        "follows_readers",
        "injects",
        "may_compare_early",
        "forward_launched",
        "fault",
        "record_format",
        "state_interval",
        "records_of",
        "block_folds",
        "step",
    }
    assert named | others == {name for name in vars(Observer) if not name.startswith("_")}

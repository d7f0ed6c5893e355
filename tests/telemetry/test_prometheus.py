from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from canary_obs import __version__
from canary_obs.config import ServiceConfig
from canary_obs.heals import HealStatus
from canary_obs.hub.hub import Hub
from canary_obs.records import DrillReport, StepUnderWay, SwaDivergence, Violations
from canary_obs.slot_facts import DrillFinding
from canary_obs.telemetry.catalog import PREFIX, RANK_METRICS, MetricType, all_metrics
from canary_obs.telemetry.export_queue import ExportCounts
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import (
    Completeness,
    DrillOutcome,
    HealAction,
    HealOutcome,
    HealPolicy,
    ObserverPart,
    Phase,
    Reason,
    State,
)  # fmt: skip
from tests.service.fakes import HEALTH, counters, hello, identity, snapshot, violation

GOLDEN = Path(__file__).parents[1] / "golden/metrics.txt"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


# What is reported where healing is on, who holds which slots is followed, and batches repeat.
DAMAGE = {
    "healing": HealStatus(
        policy=HealPolicy.PROTECT, effective=HealPolicy.DRY_RUN, why="2 actions in 60 s: the limit is 2",
        pool_blocks=400, quarantined=(("full", 7),),
    ),
    "heals": {HealAction.EVICT: {HealOutcome.DONE: 2}},
    "tainted_requests": {"full": {Completeness.KNOWN: 3}},
    "taint_unknown": {"full": 1},
    "captures": {"done": 3, "failed": 1},
    "replays": 40,
}  # fmt: skip


def filled_hub(**changes):
    hub = Hub(ServiceConfig(drill_enabled=True), clock=lambda: 5.0, wall_ns=lambda: 1_000)
    me = identity()
    hub.ingest(hello(me), lambda command: None)
    hub.ingest(snapshot(me, 3, time_ns=1_000, **(DAMAGE | changes)), lambda command: None)
    hub.ingest(StepUnderWay(identity=me, seconds=2.5), lambda command: None)
    return hub


def drill(hub, outcome):
    name, _ = hub.drills.start(60.0)
    hub.drills.set_expected_ranks(name, [identity().key])
    finding = DrillFinding(id=name, outcome=outcome)
    hub.ingest(DrillReport(identity=identity(), finding=finding), lambda command: None)


def page(hub, accept="", **options):
    return Exposition(HubCollector(hub, **options)).page(accept)


def samples(hub, **options):
    text = page(hub, **options)[0].decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_exposition_is_the_golden_one():
    """`UPDATE_GOLDEN=1` rewrites it; review the difference."""
    text = page(filled_hub(violations=2))[0].decode().replace(f'version="{__version__}"', 'version="VERSION"')
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize(
    "hub", [Hub(), filled_hub(), filled_hub(violations=1)], ids=["empty", "ok", "violated"]
)
def test_promtool_has_nothing_to_say(hub):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    result = subprocess.run(
        [promtool, "check", "metrics"], input=page(hub)[0], capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")


def test_open_metrics_is_spoken_when_asked_for():
    body, media_type = page(filled_hub(), OPEN_METRICS)
    assert media_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    text, media_type = page(filled_hub(), "text/html")
    assert media_type.startswith("text/plain")
    assert b"# EOF" not in text


def test_every_row_is_exposed_by_a_full_snapshot():
    hub = filled_hub(violations=1)
    hub.ingest(Violations(identity=identity(), rows=(violation(),)), lambda command: None)
    drill(hub, DrillOutcome.DETECTED)
    exports = {"traces": ExportCounts(exported=1, queue_full=2, failed=3)}
    found = samples(hub, exports=lambda: exports, devices=lambda: (HEALTH,))
    exposed = {key[0] for key in found | samples_with_second_scrape()}
    # No evidence has come in the fixture.
    exposed |= {PREFIX + "changed_bits_total", PREFIX + "transferred_findings_total"}
    missing = {metric.name for metric in all_metrics()} - exposed
    # No sweep has run in the fixture: absent is absent.
    assert missing == {PREFIX + "sweep_progress_ratio", PREFIX + "sweep_duration_seconds"}


def test_violation_counters_point_to_the_incident_until_it_is_acknowledged():
    hub = filled_hub(violations=1)
    hub.ingest(Violations(identity=identity(), rows=(violation(),)), lambda command: None)
    (incident,) = hub.incidents.newest_first()
    body = page(hub, OPEN_METRICS)[0].decode()
    (line,) = [line for line in body.splitlines() if " # {" in line]
    labels = f'incident_id="{incident.id}",trace_id="{incident.trace_id}"'
    assert line.startswith("kv_canary_violations_total{")
    assert f"1.0 # {{{labels}}} 1.0 1700000000.0" in line
    assert len(labels) < 128
    assert "# {" not in page(hub)[0].decode()
    info = (
        f'kv_canary_incident_info{{engine="fake",group="full",incident_id="{incident.id}",instance="test",'
        'phase="sweep",position="2",rank="0",reason="kv_data",request="r1",slot="3",'
        f'trace_id="{incident.trace_id}"}} 1.0'
    )
    assert info in body
    hub.acknowledge()
    assert "kv_canary_incident_info{" not in page(hub)[0].decode()
    assert "kv_canary_incidents_total 1.0" in page(hub)[0].decode()


def test_an_incident_is_one_series_per_rank_with_that_ranks_first_violation():
    hub = Hub(clock=lambda: 5.0, wall_ns=lambda: 1_000)
    for rank, slots in ((0, (3, 4)), (1, (7, 8)), (0, (5,))):
        rows = tuple(violation(slot, request="r" * 90, position=None) for slot in slots)
        hub.ingest(Violations(identity=identity(rank=rank), rows=rows), lambda command: None)
    (incident,) = hub.incidents.newest_first()
    lines = [line for line in page(hub)[0].decode().splitlines() if "_incident_info{" in line]
    series = [
        series for series in text_string_to_metric_families("\n".join(lines)) for series in series.samples
    ]
    shown = {sample.labels["rank"]: sample.labels for sample in series}
    assert (len(series), shown.keys()) == (2, {"0", "1"})
    assert [shown[rank]["slot"] for rank in "01"] == ["3", "7"]
    assert {labels["incident_id"] for labels in shown.values()} == {incident.id}
    assert {labels["position"] for labels in shown.values()} == {""}
    assert {labels["request"] for labels in shown.values()} == {"r" * 64}


def samples_with_second_scrape():
    exposition = Exposition(HubCollector(filled_hub()))
    exposition.page("")
    text = exposition.page("")[0].decode()
    return {(family.name,): 0.0 for family in text_string_to_metric_families(text)}


def test_rows_keep_the_naming_rules():
    names = [metric.name for metric in all_metrics()]
    assert len(names) == len(set(names))
    for metric in all_metrics():
        assert metric.name.startswith(PREFIX)
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
        assert not metric.unit or metric.name.removesuffix("_total").endswith(metric.unit)
        assert metric.help.endswith(".")


def test_counters_exist_at_zero_before_anything_happened():
    hub = Hub(clock=lambda: 5.0, wall_ns=lambda: 1_000)
    hub.ingest(snapshot(identity(), 0, time_ns=1_000), lambda command: None)
    found = samples(hub)
    violations = {key: value for key, value in found.items() if key[0] == PREFIX + "violations_total"}
    assert len(violations) == len(Phase) * len(Reason)
    assert set(violations.values()) == {0.0}
    assert observer_faults(found) == dict.fromkeys(ObserverPart, 0.0)


def observer_faults(found):
    return {
        dict(key[1:])["part"]: value
        for key, value in found.items()
        if key[0] == PREFIX + "observer_faults_total"
    }


def test_a_fault_of_a_part_that_the_service_does_not_know_is_exposed():
    found = observer_faults(samples(filled_hub(observer_faults={"of_a_newer_engine": 2, "pump": 1})))
    assert found == dict.fromkeys(ObserverPart, 0.0) | {"of_a_newer_engine": 2.0, "pump": 1.0}


def test_what_is_not_known_is_absent():
    bare = {"patrol": None, "last_sweep_ns": None, "perturbations": {}, "kernels_stalled": None}
    bare |= {"swa_divergence": None}
    names = {key[0] for key in samples(filled_hub(**bare))}
    for name in ("patrol_cycles_total", "patrol_oldest_check_seconds", "perturbations_total"):
        assert PREFIX + name not in names
    for name in ("swa_index_divergence", "swa_out_of_window_tokens", "swa_slots_verified_total"):
        assert PREFIX + name not in names
    for name in ("kernel_healthy", "sweep_last_completed_timestamp_seconds"):
        assert PREFIX + name not in names
    assert "# TYPE kv_canary_patrol" not in page(filled_hub(**bare))[0].decode()


def test_state_is_one_hot():
    found = samples(filled_hub(violations=1))
    states = {dict(key[1:])["state"]: value for key, value in found.items() if key[0] == PREFIX + "state"}
    assert states == {state.value: float(state is State.VIOLATED) for state in State}


def test_bytes_verified_are_slots_times_protected_bytes():
    key = (PREFIX + "bytes_verified_total", ("engine", "fake"), ("group", "full"), ("instance", "test"),
           ("phase", "sweep"), ("rank", "0"))  # fmt: skip
    assert samples(filled_hub())[key] == 6 * 64


def test_verified_slots_of_both_groups_stand_side_by_side():
    groups = {"full": counters(3), "swa": counters(2)}
    found = samples(filled_hub(groups=groups))
    verified = {dict(key[1:])["group"]: value for key, value in found.items() if "swa_slots" in key[0]}
    assert verified == {"full": 60.0, "swa": 40.0}


def test_of_several_window_groups_the_least_verified_one_counts():
    groups = {"full": counters(3), "swa": counters(2), "swa2": counters(1)}
    windows = SwaDivergence(
        step=1, verified_full=9, verified_swa=9, index_divergence=9, out_of_window=9,
        full_groups=("full",), swa_groups=("swa", "swa2"),
    )  # fmt: skip
    for shown, wanted in ((groups, {"full": 60.0, "swa": 20.0}), ({"full": counters(3)}, {"full": 60.0})):
        found = samples(filled_hub(groups=shown, swa_divergence=windows))
        verified = {dict(key[1:])["group"]: value for key, value in found.items() if "swa_slots" in key[0]}
        assert verified == wanted


def test_a_stalled_kernel_is_unhealthy():
    found = samples(filled_hub(kernels_stalled={"full": ("head",)}))
    healthy = {dict(key[1:])["phase"]: value for key, value in found.items() if "kernel_healthy" in key[0]}
    assert healthy == {"head": 0.0, "tail": 1.0, "sweep": 1.0, "patrol": 1.0, "hit": 1.0}


def fail(rank):
    raise RuntimeError("injected")


@pytest.mark.parametrize(
    "read",
    [fail, lambda rank: [(("stray",), 1.0)], lambda rank: [((), None)]],
    ids=["raises", "one label too many", "no number"],
)
def test_a_family_that_fails_is_left_out_and_counted(monkeypatch, caplog, read):
    (broken,) = (metric for metric in RANK_METRICS if metric.name == PREFIX + "steps_total")
    rows = tuple(
        metric if metric is not broken else type(metric)(**{**fields(metric), "read": read})
        for metric in RANK_METRICS
    )
    monkeypatch.setattr("canary_obs.telemetry.prometheus.RANK_METRICS", rows)
    found = samples(filled_hub(), log_dropped=lambda: 4)
    assert len(found) > 100
    assert PREFIX + "steps_total" not in {key[0] for key in found}
    assert found[(PREFIX + "scrape_errors_total",)] == 1.0
    assert found[(PREFIX + "log_events_dropped_total",)] == 4.0
    assert "kv_canary_steps_total cannot be collected" in caplog.text


def fields(metric):
    return {name: getattr(metric, name) for name in ("name", "type", "unit", "labels", "help", "read")}


def test_label_values_are_escaped():
    hub = Hub(clock=lambda: 5.0, wall_ns=lambda: 1_000)
    me = msgspec.structs.replace(identity(), instance='a"b\nc')
    hub.ingest(snapshot(me, 1, time_ns=1_000), lambda command: None)
    assert any(("instance", 'a"b\nc') in key for key in samples(hub))


def test_drills_are_counted_by_rank_and_are_no_violations():
    hub = filled_hub()
    rank = (("engine", "fake"), ("instance", "test"))
    before = samples(hub)
    zeros = {key: value for key, value in before.items() if key[0] == PREFIX + "drills_total"}
    assert len(zeros) == len(DrillOutcome)
    assert set(zeros.values()) == {0.0}
    assert not any(key[0] == PREFIX + "drill_last_detected_timestamp_seconds" for key in before)
    drill(hub, DrillOutcome.MISSED)
    drill(hub, DrillOutcome.DETECTED)
    drill(hub, DrillOutcome.DETECTED)
    found = samples(hub)
    drills = {
        outcome.value: found[PREFIX + "drills_total", *rank, ("outcome", outcome.value), ("rank", "0")]
        for outcome in DrillOutcome
    }
    assert drills == {"detected": 2.0, "missed": 1.0, "refused": 0.0, "unanswered": 0.0}
    assert found[PREFIX + "drill_last_detected_timestamp_seconds", *rank, ("rank", "0")] == 1e-6
    changed = {key[0] for key in found if found[key] != before.get(key)} - {
        PREFIX + "scrape_duration_seconds"
    }
    assert changed == {
        PREFIX + "drills_total",
        PREFIX + "drill_last_detected_timestamp_seconds",
        PREFIX + "hub_messages_total",
    }
    assert not any(key[0].startswith(PREFIX + "drill") for key in samples(Hub()))


def test_the_gpu_of_a_rank_is_named_as_dcgm_exporter_names_it():
    (labels,) = (dict(key[1:]) for key in samples(filled_hub()) if key[0] == f"{PREFIX}rank_info")
    assert labels["gpu_uuid"] == "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    assert labels["pci_bus_id"] == "00000000:1B:00.0"
    assert (labels["gpu_model"], labels["node"], labels["model"]) == ("NVIDIA H200", "node-1", "tiny@1")
    assert labels["driver_version"] == "580.95.05"


def test_a_gpu_that_nobody_names_has_no_labels():
    """An empty label is none to Prometheus."""
    hub = filled_hub()
    anonymous = msgspec.structs.replace(hello(identity()), node=None, gpu=None, model=None)
    hub.ingest(anonymous, lambda command: None)
    (labels,) = (dict(key[1:]) for key in samples(hub) if key[0] == f"{PREFIX}rank_info")
    assert labels["engine_version"] == "1.0"
    assert not any(labels[name] for name in ("node", "gpu_uuid", "pci_bus_id", "gpu_model", "model"))

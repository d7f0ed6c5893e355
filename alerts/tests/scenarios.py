"""A scenario per alert: the series that make it fire, for how long, and the value that it then shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from alerts.tests.timeline import (
    RANK,
    SERVICE,
    Series,
    Spans,
    rank_counter,
    rank_gauge,
    service_counter,
    service_gauge,
    states,
)

# In samples of 15 s: long enough for windows of 10 minutes to fill and to empty again.
SHORT = Spans(quiet=8, bad=16, good=60)
HOUR = Spans(quiet=10, bad=90, good=90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`shown` is the value in the annotations; `labels` are those of the series, without the rule's own."""

    alert: str
    series: tuple[Series, ...]
    shown: str = ""
    labels: dict[str, str] = field(default_factory=lambda: RANK)
    spans: Spans = SHORT
    seconds: int = 15  # between samples
    outlives_its_target: bool = False  # fires, by design, when its series end


def up(quiet: float | str, bad: float | str) -> Series:
    """Series `up` of the service's target."""
    return Series(name="up", labels=SERVICE, quiet=quiet, bad=bad, good=quiet)


DAMAGE = (
    Scenario(alert="KVCanaryDamage", series=states("violated")),
    Scenario(
        alert="KVCanaryDamageSpreading",
        series=(rank_counter("violations", 0, 60, group="full", phase="tail", reason="kv_data"),),
        shown="4",
    ),
    Scenario(
        alert="KVCanaryDrillMissed",
        series=(rank_counter("perturbations", 0, 1, mode="real_kv_used", outcome="missed"),),
        shown="16",
    ),
    Scenario(
        alert="KVCanaryDrillMissed",
        series=(rank_counter("drills", 0, 1, outcome="missed"),),
        shown="16",
    ),
)

BLIND = (
    Scenario(alert="KVCanaryTargetDown", series=(up(1, 0),), labels=SERVICE),
    Scenario(
        alert="KVCanaryTargetAbsent",
        series=(up(1, "_"),),
        labels={"job": "kv-canary"},
        spans=Spans(quiet=8, bad=30, good=60),  # the last sample is believed for five minutes
        outlives_its_target=True,
    ),
    Scenario(
        alert="KVCanaryNoEngine",
        series=(service_gauge("ranks", 0, 1, state="off"), service_gauge("ranks", 1, 0, state="ok")),
        labels=SERVICE,
        spans=Spans(quiet=8, bad=30, good=60),
    ),
    Scenario(
        alert="KVCanaryRankVanished",
        series=(rank_gauge("state", 0, "_", state="off"), rank_gauge("state", 1, "_", state="ok")),
        spans=Spans(quiet=8, bad=30, good=60),
        outlives_its_target=True,
    ),
    Scenario(
        alert="KVCanaryRankMissing",
        series=(service_gauge("ranks_missing", 0, 2, engine="vllm", instance="a"),),
        labels=SERVICE | {"engine": "vllm", "instance": "a"},
    ),
    Scenario(alert="KVCanaryBlind", series=states("blind")),
    Scenario(
        alert="KVCanarySnapshotStale",
        series=(rank_gauge("snapshot_age_seconds", 0.25, 90), *states("blind")),
        shown="1m 30s",
    ),
    Scenario(
        alert="KVCanaryKernelStalled",
        series=(
            rank_gauge("kernel_healthy", 1, 0, group="full", phase="tail"),
            rank_gauge("kernel_healthy", 1, 1, group="full", phase="head"),
        ),
    ),
    Scenario(
        alert="KVCanaryChecksNotRunning",
        series=(
            rank_counter("steps", 100, 100),
            rank_counter("kernel_runs", 100, 0, group="full", phase="head"),
            rank_counter("kernel_runs", 3, 3, group="full", phase="patrol"),
        ),
    ),
    Scenario(  # no hook reaches the canary: it counts no steps, the engine counts forwards
        alert="KVCanaryChecksNotRunning",
        series=(
            rank_counter("steps", 100, 0),
            rank_counter("kernel_runs", 100, 0, group="full", phase="head"),
            rank_counter("forwards", 100, 100, group="full"),
            rank_counter("forwards_checked", 100, 0, group="full"),
        ),
    ),
    Scenario(  # the target's forwards are shown, the draft model's are not
        alert="KVCanaryChecksNotRunning",
        series=(
            rank_counter("steps", 100, 100),
            rank_counter("kernel_runs", 100, 100, group="full", phase="head"),
            rank_counter("forwards", 100, 100, group="full"),
            rank_counter("forwards_checked", 100, 100, group="full"),
            rank_counter("forwards", 100, 100, group="draft"),
            rank_counter("forwards_checked", 100, 0, group="draft"),
        ),
    ),
    Scenario(
        alert="KVCanaryWindowNotChecked",
        series=(
            rank_counter("swa_slots_verified", 100, 100, group="full"),
            rank_counter("swa_slots_verified", 30, 0, group="swa"),
        ),
    ),
    Scenario(
        alert="KVCanaryPipelineStale", series=(rank_gauge("pipeline_lag_seconds", 0.02, 45),), shown="45s"
    ),
    Scenario(
        alert="KVCanaryObserverFault",
        series=(rank_counter("observer_faults", 0, 1, part="pump"),),
        shown="16",
    ),
    Scenario(
        alert="KVCanaryMetricsIncomplete",
        series=(service_counter("scrape_errors", 0, 1),),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryServiceFault",
        series=(service_counter("service_faults", 0, 1, part="zmq_listener"),),
        labels=SERVICE,
        shown="16",
    ),
)

DEBT = (
    Scenario(
        alert="KVCanaryCoverageLow",
        series=(
            rank_gauge("protected_bytes", 1000, 900, group="full"),
            rank_gauge("allocated_bytes", 1000, 1000),
        ),
        shown="90%",
        spans=Spans(quiet=8, bad=30, good=60),
    ),
    Scenario(
        alert="KVCanaryUnverifiedHigh",
        series=(
            rank_counter("slots_unverified", 0, 25, group="full", cause="adopted"),
            rank_counter("slots_unverified", 500, 500, group="full", cause="evicted"),
            rank_counter("slots_verified", 75, 75, group="full", phase="head"),
        ),
        shown="25%",
        spans=Spans(quiet=20, bad=90, good=60),
    ),
    Scenario(
        alert="KVCanarySweepOverdue",
        # A sweep ends at every sample, then none does, then the timestamp catches up at twice the rate.
        series=(
            Series(
                name="kv_canary_sweep_last_completed_timestamp_seconds",
                labels=RANK,
                quiet=60,
                bad=0,
                good=120,
                rises=True,
            ),
            *states("degraded"),
        ),
        shown="1h 29m 0s",
        spans=HOUR,
        seconds=60,
    ),
    Scenario(
        alert="KVCanarySweepNever",
        series=(
            rank_gauge("sweep_last_completed_timestamp_seconds", 0, "_", good=11000),
            *states("degraded"),
        ),
        spans=HOUR,
        seconds=60,
    ),
    Scenario(
        alert="KVCanaryPatrolOverdue",
        series=(rank_gauge("patrol_oldest_check_seconds", 7, 7200), *states("degraded")),
        shown="2h 0m 0s",
    ),
    Scenario(
        alert="KVCanaryEvidenceDropped",
        series=(rank_counter("violation_events_dropped", 0, 1), rank_counter("messages_dropped", 0, 0)),
        shown="16",
    ),
    Scenario(
        alert="KVCanaryServiceDropped",
        series=(service_counter("log_events_dropped", 0, 1), service_counter("hub_violations_evicted", 0, 0)),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryTelemetryDropped",
        series=(service_counter("telemetry_dropped", 0, 1, signal="logs", cause="queue_full"),),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryPipelineSkipping",
        series=(rank_counter("pipeline_skipped", 0, 75), rank_counter("steps", 100, 100)),
        shown="75%",
        spans=Spans(quiet=20, bad=60, good=60),
    ),
    Scenario(
        alert="KVCanaryOverheadHigh",
        series=(
            rank_counter("overhead_seconds", 1, 25, phase="head"),
            rank_counter("overhead_seconds", 1, 5, phase="tail"),
            rank_counter("step_seconds", 100, 100),
        ),
        shown="30%",
        spans=Spans(quiet=20, bad=90, good=60),
    ),
    Scenario(alert="KVCanaryDegraded", series=states("degraded"), spans=Spans(quiet=8, bad=80, good=20)),
    Scenario(
        alert="KVCanaryPaused",
        series=(rank_gauge("paused", 0, 1),),
        spans=Spans(quiet=8, bad=140, good=20),
    ),
    Scenario(alert="KVCanaryHealingLimited", series=(rank_gauge("heal_limited", 0, 1),)),
    Scenario(
        alert="KVCanaryHealed",
        series=(rank_counter("heals", 0, 1, action="end", outcome="done"),),
        shown="16",
        labels=RANK | {"action": "end", "outcome": "done"},
    ),
    Scenario(
        alert="KVCanaryRestarting",
        series=(rank_counter("restarts", 0, 0.2),),
        shown="12",
        spans=Spans(quiet=70, bad=62, good=70),
        seconds=60,
    ),
    Scenario(
        alert="KVCanaryPerturbationActive",
        series=(
            rank_counter("perturbations", 0, 1, mode="real_kv_used", outcome="injected"),
            rank_counter("perturbations", 0, 1, mode="real_kv_used", outcome="detected"),
        ),
        shown="16",
    ),
    Scenario(
        alert="KVCanaryForeignFrames",
        series=(
            service_counter("hub_frames_undecodable", 0, 1),
            service_counter("hub_messages_refused", 0, 0),
        ),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryMessagesInvalid",
        series=(
            service_counter("hub_messages_invalid", 0, 1, cause="falling"),
            service_counter("hub_messages_invalid", 0, 0, cause="rank"),
        ),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryHandshakesRefused",
        series=(
            service_counter("hub_handshakes_refused", 0, 1, cause="unknown_key"),
            service_counter("hub_handshakes_refused", 0, 0, cause="service_key"),
            service_counter("hub_handshakes_refused", 1, 1, cause="broken_off"),
        ),
        labels=SERVICE,
        shown="16",
    ),
    Scenario(
        alert="KVCanaryScrapeSlow",
        series=(service_gauge("scrape_duration_seconds", 0.02, 0.75),),
        labels=SERVICE,
        shown="750ms",
        spans=Spans(quiet=8, bad=30, good=20),
    ),
)

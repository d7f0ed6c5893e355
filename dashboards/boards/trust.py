"""Can green be trusted? Every input of state `ok`, with the threshold of its alert."""

from __future__ import annotations

from alerts.render import thresholds
from dashboards.board import (
    BAD_BELOW_ONE,
    BAD_FROM_ONE,
    GREEN,
    NO_DRILL,
    NO_FAULT,
    NO_LONG_STEP,
    NO_RECEIVER,
    RED,
    TO_ENGINE,
    TO_RUNBOOK,
    Board,
    Column,
    Panel,
    PanelType,
    Query,
    Section,
    Step,
    bands,
    counted,
    firing,
    group,
    rank,
    recorded,
    service,
)


def _limit(name: str) -> float:
    return float(thresholds()[name]["value"])


def _above(name: str) -> tuple[Step, ...]:
    return (Step(colour=GREEN), Step(colour=RED, value=_limit(name)))


def _below(name: str) -> tuple[Step, ...]:
    return (Step(colour=RED), Step(colour=GREEN, value=_limit(name)))


BOARD = Board(
    uid="kv-canary-trust",
    title="KV canary / Can green be trusted?",
    description="If nothing is red here, a green fleet means that KV content has been checked.",
    sections=(
        Section(
            title="Blindness",
            panels=(
                Panel(
                    title="Service scraped",
                    description="0 = no metrics, hence no alerts.",
                    queries=(Query(expression='min(up{job="kv-canary"})', legend="up"),),
                    type=PanelType.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Live ranks",
                    description="Ranks that are not off.",
                    queries=(
                        Query(expression=f"""sum({service("ranks", 'state!="off"')})""", legend="ranks"),
                    ),
                    type=PanelType.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Kernels healthy",
                    description="The minimum over all checks.",
                    queries=(Query(expression=f"min({group('kernel_healthy')})", legend="healthy"),),
                    type=PanelType.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Self-faults in range",
                    description="Exceptions caught in the canary and in the service, and omitted metrics.",
                    queries=(
                        Query(
                            expression=f"sum({counted(recorded('observer_faults:total'))})",
                            legend="observer",
                        ),
                        Query(
                            expression=f"sum({counted(service('service_faults_total'))})",
                            legend="service",
                        ),
                        Query(
                            expression=f"sum({counted(service('scrape_errors_total'))})",
                            legend="metrics",
                        ),
                    ),
                    type=PanelType.STAT,
                    height=5,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Age of the snapshot",
                    description="How long a rank has sent no snapshot.",
                    queries=bands(rank("snapshot_age_seconds")),
                    unit="s",
                    steps=_above("snapshot_age_seconds"),
                ),
                Panel(
                    title="Ranks that do not report",
                    description="Ranks that an engine says it has, and that the service does not hear.",
                    queries=(
                        Query(
                            expression=f"topk(50, {service('ranks_missing')})",
                            legend="{{engine}}/{{instance}}",
                        ),
                    ),
                    type=PanelType.TABLE,
                    columns=(Column(title="Missing"),),
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Step under way",
                    description="Age of an engine step that delays the rank's snapshots.",
                    queries=bands(rank("step_under_way_seconds"), empty=NO_LONG_STEP),
                    unit="s",
                ),
                Panel(
                    title="Clock skew",
                    description="The engine's wall clock minus the service's. No check depends on it.",
                    queries=bands(rank("clock_skew_seconds")),
                    unit="s",
                ),
                Panel(
                    title="Age of the counters",
                    description="How old the host's copy of the device counters is.",
                    queries=bands(rank("pipeline_lag_seconds")),
                    unit="s",
                    steps=_above("lag_seconds"),
                ),
            ),
        ),
        Section(
            title="Coverage and ages",
            panels=(
                Panel(
                    title="Coverage",
                    description="KV bytes under a fingerprint over KV bytes in the pool.",
                    queries=bands(recorded("coverage:ratio"), low=True),
                    unit="percentunit",
                    steps=_below("coverage_ratio"),
                ),
                Panel(
                    title="KV memory of the engine",
                    description="KV bytes that the engine has allocated, by its own configuration and memory.",
                    queries=bands(rank("allocated_bytes")),
                    unit="bytes",
                ),
                Panel(
                    title="Unverified",
                    description="Slots that were due for a check and could not be checked, without evicted ones.",
                    queries=bands(recorded("unverified:ratio5m")),
                    unit="percentunit",
                    steps=_above("unverified_ratio"),
                ),
                Panel(
                    title="Age of the last complete sweep",
                    description="Bounds the age of damage in cached slots that no request reads.",
                    queries=bands(recorded("sweep_age:seconds")),
                    unit="s",
                    steps=_above("sweep_age_seconds"),
                ),
                Panel(
                    title="Age of the oldest byte check",
                    description="Bounds the age of a flipped bit; with the duration of the last patrol cycle.",
                    queries=(
                        *bands(rank("patrol_oldest_check_seconds"), "oldest"),
                        *bands(rank("patrol_cycle_seconds"), "cycle", empty="before the first cycle ends"),
                    ),
                    unit="s",
                    steps=_above("patrol_age_seconds"),
                ),
            ),
        ),
        Section(
            title="Drills",
            panels=(
                Panel(
                    title="Drills in range",
                    description="By outcome; each injects one fault into an unused slot.",
                    queries=(
                        Query(
                            expression=f"sum by (outcome) ({counted(rank('drills_total'))})",
                            legend="{{outcome}}",
                            empty=NO_DRILL,
                        ),
                    ),
                ),
                Panel(
                    title="Age of the last detected drill",
                    description="Time since a drill last proved that a fault is detected.",
                    queries=(
                        *bands(f"time() - {rank('drill_last_detected_timestamp_seconds')}", empty=NO_DRILL),
                    ),
                    unit="s",
                ),
            ),
        ),
        Section(
            title="Losses",
            panels=(
                Panel(
                    title="Dropped evidence",
                    description="Rows and messages that ranks could not send; counts are never lost.",
                    queries=(
                        Query(
                            expression=f"sum({counted(rank('violation_events_dropped_total'))})",
                            legend="rows",
                        ),
                        Query(
                            expression=f"sum({counted(rank('messages_dropped_total'))})",
                            legend="messages",
                        ),
                    ),
                ),
                Panel(
                    title="Dropped by the service",
                    description="Log lines, violation rows, refused messages and frames, refused connections.",
                    queries=tuple(
                        Query(expression=f"sum by (cause) ({counted(service(name))})", legend=legend)
                        for name, legend in (
                            ("hub_handshakes_refused_total", "connections: {{cause}}"),
                            ("log_events_dropped_total", "log lines"),
                            ("hub_violations_evicted_total", "discarded rows"),
                            ("hub_ranks_expired_total", "forgotten ranks"),
                            ("hub_messages_refused_total", "refused messages"),
                            ("hub_messages_invalid_total", "impossible messages: {{cause}}"),
                            ("hub_frames_undecodable_total", "undecodable frames"),
                        )
                    ),
                ),
                Panel(
                    title="Spans and logs",
                    description="Accepted by the OTLP receiver, per second, and lost within the time range.",
                    queries=(
                        Query(
                            expression=f"sum by (signal) (rate({service('telemetry_exported_total')}[$__rate_interval]))",
                            legend="{{signal}} exported",
                            empty=NO_RECEIVER,
                        ),
                        Query(
                            expression=f"sum by (signal, cause) ({counted(service('telemetry_dropped_total'))})",
                            legend="{{signal}} lost: {{cause}}",
                            empty=NO_RECEIVER,
                        ),
                    ),
                ),
                Panel(
                    title="Skipped counter copies",
                    description="Share of steps; adds lag, loses nothing.",
                    queries=bands(recorded("skipped:ratio5m")),
                    unit="percentunit",
                    steps=_above("skipped_ratio"),
                ),
                Panel(
                    title="Messages received",
                    description="By kind, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (kind) (rate({service('hub_messages_total')}[$__rate_interval]))",
                            legend="{{kind}}",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Paused",
                    description="1 while sweeps and patrol of a rank are paused, by engine.",
                    queries=(
                        Query(
                            expression=f"max without (rank) ({rank('paused')})",
                            legend="{{engine}}/{{instance}}",
                        ),
                    ),
                    type=PanelType.STATES,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Blindness and debt alerts",
                    description="Firing now.",
                    queries=(
                        Query(expression=f"topk(50, {firing('blind|debt')})", legend="", empty=NO_FAULT),
                    ),
                    type=PanelType.TABLE,
                    links=(TO_RUNBOOK, TO_ENGINE),
                ),
            ),
        ),
    ),
)

"""Can green be trusted? Every input of `ok`, with the limit its alert uses."""

from __future__ import annotations

from alerts.render import thresholds
from dashboards.board import (
    BAD_BELOW_ONE,
    BAD_FROM_ONE,
    NAME,
    NO_DRILL,
    NO_FAULT,
    NO_RECEIVER,
    Board,
    Kind,
    Panel,
    Query,
    Section,
    Step,
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
    return (Step(colour="green"), Step(colour="red", value=_limit(name)))


def _below(name: str) -> tuple[Step, ...]:
    return (Step(colour="red"), Step(colour="green", value=_limit(name)))


BOARD = Board(
    uid="kv-canary-trust",
    title="KV canary / Can green be trusted?",
    says="Nothing red here, and a green fleet means that KV content was checked.",
    sections=(
        Section(
            title="Blindness",
            panels=(
                Panel(
                    title="Service scraped",
                    says="0 = no metric, hence no alert.",
                    queries=(Query(expression='min(up{job="kv-canary"})', legend="up"),),
                    kind=Kind.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Live ranks",
                    says="Ranks that are not off.",
                    queries=(
                        Query(expression=f"""sum({service("ranks", 'state!="off"')})""", legend="ranks"),
                    ),
                    kind=Kind.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Kernels healthy",
                    says="The worst of all checks.",
                    queries=(Query(expression=f"min({group('kernel_healthy')})", legend="healthy"),),
                    kind=Kind.STAT,
                    width=4,
                    height=5,
                    steps=BAD_BELOW_ONE,
                ),
                Panel(
                    title="Self-faults in range",
                    says="Exceptions caught in the canary and in the service, and metrics left out.",
                    queries=(
                        Query(
                            expression=f"sum({counted(rank('observer_faults_total'))})",
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
                    kind=Kind.STAT,
                    height=5,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Age of the snapshot",
                    says="How long a rank has been silent.",
                    queries=(Query(expression=rank("snapshot_age_seconds")),),
                    unit="s",
                    steps=_above("snapshot_age_seconds"),
                ),
                Panel(
                    title="Age of the counters",
                    says="How old the host's copy of the device counters is.",
                    queries=(Query(expression=rank("pipeline_lag_seconds")),),
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
                    says="KV bytes under a fingerprint over KV bytes in the pool.",
                    queries=(Query(expression=recorded("coverage:ratio")),),
                    unit="percentunit",
                    steps=_below("coverage_ratio"),
                ),
                Panel(
                    title="Unverified",
                    says="Slots that came up for a check and could not be checked (evicted ones left out).",
                    queries=(Query(expression=recorded("unverified:ratio5m")),),
                    unit="percentunit",
                    steps=_above("unverified_ratio"),
                ),
                Panel(
                    title="Age of the last complete sweep",
                    says="The bound for damage in cached slots that nobody reads.",
                    queries=(Query(expression=recorded("sweep_age:seconds")),),
                    unit="s",
                    steps=_above("sweep_age_seconds"),
                ),
                Panel(
                    title="Age of the oldest byte check",
                    says="The patrol's bound, with the length of its last cycle once there was one.",
                    queries=(
                        Query(expression=rank("patrol_oldest_check_seconds")),
                        Query(
                            expression=rank("patrol_cycle_seconds"),
                            legend="cycle, " + NAME,
                            empty="before the first cycle ends",
                        ),
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
                    says="One fault each, in a slot that nobody uses: how they ended.",
                    queries=(
                        Query(
                            expression=counted(rank("drills_total")),
                            legend="{{outcome}}, " + NAME,
                            empty=NO_DRILL,
                        ),
                    ),
                ),
                Panel(
                    title="Age of the last detected drill",
                    says="When it was last seen that a fault is found.",
                    queries=(
                        Query(
                            expression=f"time() - {rank('drill_last_detected_timestamp_seconds')}",
                            empty=NO_DRILL,
                        ),
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
                    says="Rows and messages that ranks could not hand over; counts are never lost.",
                    queries=(
                        Query(
                            expression=counted(rank("violation_events_dropped_total")),
                            legend="rows, " + NAME,
                        ),
                        Query(
                            expression=counted(rank("messages_dropped_total")),
                            legend="messages, " + NAME,
                        ),
                    ),
                ),
                Panel(
                    title="Dropped by the service",
                    says="Log lines, kept rows, refused and foreign frames, connections not let in.",
                    queries=tuple(
                        Query(expression=counted(service(name)), legend=legend)
                        for name, legend in (
                            ("hub_handshakes_refused_total", "connections: {{cause}}"),
                            ("log_events_dropped_total", "log lines"),
                            ("hub_violations_evicted_total", "rows that made room"),
                            ("hub_messages_refused_total", "refused messages"),
                            ("hub_frames_undecodable_total", "foreign frames"),
                        )
                    ),
                ),
                Panel(
                    title="Spans and logs",
                    says="Taken by the OTLP receiver, per second, and lost on the way in range.",
                    queries=(
                        Query(
                            expression=f"rate({service('telemetry_exported_total')}[$__rate_interval])",
                            legend="{{signal}} exported",
                            empty=NO_RECEIVER,
                        ),
                        Query(
                            expression=counted(service("telemetry_dropped_total")),
                            legend="{{signal}} lost: {{cause}}",
                            empty=NO_RECEIVER,
                        ),
                    ),
                ),
                Panel(
                    title="Skipped counter copies",
                    says="Share of steps; costs lag, loses nothing.",
                    queries=(Query(expression=recorded("skipped:ratio5m")),),
                    unit="percentunit",
                    steps=_above("skipped_ratio"),
                ),
                Panel(
                    title="Messages received",
                    says="By kind, per second.",
                    queries=(
                        Query(
                            expression=f"rate({service('hub_messages_total')}[$__rate_interval])",
                            legend="{{kind}}",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Paused",
                    says="1 while sweeps and patrol are paused.",
                    queries=(Query(expression=rank("paused")),),
                    kind=Kind.STATES,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Blindness and debt alerts",
                    says="Firing now.",
                    queries=(Query(expression=firing("blind|debt"), legend="", empty=NO_FAULT),),
                    kind=Kind.TABLE,
                ),
            ),
        ),
    ),
)

"""Engine detail: one instance, rank by rank, group by group."""

from __future__ import annotations

from dashboards.board import (
    BAD_BELOW_ONE,
    NO_REPLAY,
    NO_SWEEP,
    NO_WINDOW,
    TO_INCIDENTS,
    Board,
    Column,
    Panel,
    PanelType,
    Query,
    Section,
    bands,
    group,
    rank,
    recorded,
)

RATE = "[$__rate_interval]"


def _rate(title: str, description: str, metric: str, by: str, legend: str, unit: str = "ops") -> Panel:
    expression = f"sum by ({by}) (rate({group(metric)}{RATE}))"
    return Panel(
        title=title,
        description=description,
        queries=(Query(expression=expression, legend=legend),),
        unit=unit,
    )


BOARD = Board(
    uid="kv-canary-engine",
    title="KV canary / Engine",
    description="One engine instance in detail.",
    one_instance=True,
    sections=(
        Section(
            title="Ranks",
            panels=(
                Panel(
                    title="Ranks, worst first",
                    description="A row links the incidents of this engine.",
                    queries=tuple(
                        Query(expression=expression, legend="")
                        for expression in (
                            recorded("state:severity"),
                            recorded("violations:total"),
                            recorded("coverage:ratio"),
                            recorded("sweep_age:seconds"),
                            rank("patrol_oldest_check_seconds"),
                            rank("snapshot_age_seconds"),
                            recorded("unverified:ratio5m"),
                            recorded("overhead:ratio5m"),
                        )
                    ),
                    type=PanelType.TABLE,
                    width=24,
                    height=10,
                    columns=(
                        Column(title="State", severity=True),
                        Column(title="Violations"),
                        Column(title="Coverage", unit="percentunit"),
                        Column(title="Sweep age", unit="s"),
                        Column(title="Oldest byte check", unit="s"),
                        Column(title="Silent for", unit="s"),
                        Column(title="Unverified", unit="percentunit"),
                        Column(title="Overhead", unit="percentunit"),
                    ),
                    links=(TO_INCIDENTS,),
                ),
            ),
        ),
        Section(
            title="Steps",
            panels=(
                Panel(
                    title="Forward steps",
                    description="Steps observed per second.",
                    queries=bands(f"rate({rank('steps_total')}{RATE})", low=True),
                    unit="ops",
                ),
                Panel(
                    title="Forwards not checked",
                    description="Forwards that the engine counts, less those whose checks were launched.",
                    queries=(
                        Query(
                            expression=f"max by (group) ({group('forwards_total')} - {group('forwards_checked_total')})",
                            legend="{{group}}, highest of a rank",
                        ),
                    ),
                ),
                Panel(
                    title="Step time",
                    description="Engine time between step starts.",
                    queries=bands(
                        f"rate({rank('step_seconds_total')}{RATE}) / (rate({rank('steps_total')}{RATE}) > 0)"
                    ),
                    unit="s",
                ),
                _rate(
                    "Check launches",
                    "Finished launches per second.",
                    "kernel_runs_total",
                    "group, phase",
                    "{{group}} {{phase}}",
                ),
                Panel(
                    title="Checks replayed",
                    description="Launches of captured checks per second, at most two per step, and captures.",
                    queries=(
                        Query(
                            expression=f"sum(rate({rank('replays_total')}{RATE}))",
                            legend="replays",
                            empty=NO_REPLAY,
                        ),
                        Query(
                            expression=f"sum by (outcome) (rate({rank('captures_total')}{RATE}))",
                            legend="captures {{outcome}}",
                            empty=NO_REPLAY,
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Kernels healthy",
                    description="1 if every launched check has finished on every rank.",
                    queries=(
                        Query(
                            expression=f"min by (group, phase) ({group('kernel_healthy')})",
                            legend="{{group}} {{phase}}",
                        ),
                    ),
                    type=PanelType.STATES,
                    steps=BAD_BELOW_ONE,
                ),
            ),
        ),
        Section(
            title="Slots",
            panels=(
                _rate(
                    "Verified",
                    "Records checked per second.",
                    "slots_verified_total",
                    "group, phase",
                    "{{group}} {{phase}}",
                ),
                _rate(
                    "Bytes compared",
                    "Slots whose bytes were compared.",
                    "slots_hashed_total",
                    "group, phase",
                    "{{group}} {{phase}}",
                ),
                _rate(
                    "Written",
                    "Slots whose record got a new identity.",
                    "slots_written_total",
                    "group",
                    "{{group}}",
                ),
                _rate(
                    "Completed",
                    "Slots whose record got a fingerprint.",
                    "slots_completed_total",
                    "group",
                    "{{group}}",
                ),
                _rate(
                    "Could not be checked",
                    "By cause; evicted is harmless.",
                    "slots_unverified_total",
                    "group, cause",
                    "{{group}} {{cause}}",
                ),
                _rate(
                    "Loads compared",
                    "Slots that a KV connector loaded, compared with the records of what was sent.",
                    "loads_compared_total",
                    "group",
                    "{{group}}",
                ),
                _rate(
                    "Loads without records",
                    "Slots that a KV connector loaded, of which no record was known.",
                    "loads_left_out_total",
                    "group",
                    "{{group}}",
                ),
                _rate(
                    "Violations",
                    "By phase and reason.",
                    "violations_total",
                    "phase, reason",
                    "{{phase}} {{reason}}",
                ),
                _rate(
                    "Redetections",
                    "Known damage that checks meet again.",
                    "redetections_total",
                    "group, reason",
                    "{{group}} {{reason}}",
                ),
            ),
        ),
        Section(
            title="Sliding windows",
            panels=(
                Panel(
                    title="Full and sliding-window group",
                    description="Live tokens without a sliding-window slot, and with slots of different indices.",
                    queries=(
                        Query(
                            expression=f"sum({rank('swa_out_of_window_tokens')})",
                            legend="out of the window",
                            empty=NO_WINDOW,
                        ),
                        Query(
                            expression=f"min({rank('swa_index_divergence')})",
                            legend="other index, lowest of a rank",
                            empty=NO_WINDOW,
                        ),
                    ),
                ),
                Panel(
                    title="Verified around forwards",
                    description="Slots per second; swa has fewer, and must not be 0 while full is not.",
                    queries=(
                        Query(
                            expression=f"min by (group) (rate({rank('swa_slots_verified_total')}{RATE}))",
                            legend="{{group}}, lowest of a rank",
                            empty=NO_WINDOW,
                        ),
                    ),
                    unit="ops",
                ),
            ),
        ),
        Section(
            title="Sweeps and patrol",
            panels=(
                Panel(
                    title="Sweep progress",
                    description="Share of its slots that the current or last sweep has checked or skipped.",
                    queries=bands(rank("sweep_progress_ratio"), low=True, empty=NO_SWEEP),
                    unit="percentunit",
                ),
                Panel(
                    title="Sweeps",
                    description="Complete passes by trigger, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (trigger) (rate({rank('sweep_passes_total')}{RATE}))",
                            legend="{{trigger}}",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Sweep duration",
                    description="Of the current or last sweep; and how many ranks sweep.",
                    queries=(
                        *bands(rank("sweep_duration_seconds"), empty=NO_SWEEP),
                        Query(expression=f"sum({rank('sweep_in_progress')})", legend="ranks that sweep"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Patrol",
                    description="Progress of the cycle, and cycles completed per hour.",
                    queries=(
                        *bands(rank("patrol_progress_ratio"), "progress", low=True),
                        *bands(f"3600 * rate({rank('patrol_cycles_total')}{RATE})", "cycles/h", low=True),
                    ),
                ),
            ),
        ),
        Section(
            title="Pipeline and restarts",
            panels=(
                Panel(
                    title="Lag of the counters",
                    description="Steps between the device's counters and the host's copy.",
                    queries=bands(rank("pipeline_lag_steps")),
                ),
                Panel(
                    title="Restarts",
                    description="Engine restarts that the service has observed; counters continue across them.",
                    queries=bands(rank("restarts_total")),
                ),
            ),
        ),
    ),
)

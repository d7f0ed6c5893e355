"""Engine detail: one instance, rank by rank, group by group."""

from __future__ import annotations

from dashboards.board import NAME, NO_SWEEP, NO_WINDOW, Board, Panel, PanelType, Query, Section, group, rank

RATE = "[$__rate_interval]"


def _rate(title: str, description: str, metric: str, by: str, legend: str, unit: str = "ops") -> Panel:
    expression = f"sum by (instance, rank, {by}) (rate({group(metric)}{RATE}))"
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
    sections=(
        Section(
            title="Steps",
            panels=(
                Panel(
                    title="Forward steps",
                    description="Steps observed per second.",
                    queries=(Query(expression=f"rate({rank('steps_total')}{RATE})"),),
                    unit="ops",
                ),
                Panel(
                    title="Forwards not checked",
                    description="Forwards that the engine counts, less those whose checks were launched.",
                    queries=(
                        Query(
                            expression=f"{group('forwards_total')} - {group('forwards_checked_total')}",
                            legend="rank {{rank}} {{group}}",
                        ),
                    ),
                ),
                Panel(
                    title="Step time",
                    description="Engine time between step starts.",
                    queries=(
                        Query(
                            expression=f"rate({rank('step_seconds_total')}{RATE}) / (rate({rank('steps_total')}{RATE}) > 0)"
                        ),
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
                    title="Kernels healthy",
                    description="1 if every launched check has finished.",
                    queries=(
                        Query(expression=group("kernel_healthy"), legend="rank {{rank}} {{group}} {{phase}}"),
                    ),
                    type=PanelType.STATES,
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
                    "Violations",
                    "By phase and reason.",
                    "violations_total",
                    "group, phase, reason",
                    "{{group}} {{phase}} {{reason}}",
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
                            expression=rank("swa_out_of_window_tokens"),
                            legend="out of the window, " + NAME,
                            empty=NO_WINDOW,
                        ),
                        Query(
                            expression=rank("swa_index_divergence"),
                            legend="other index, " + NAME,
                            empty=NO_WINDOW,
                        ),
                    ),
                ),
                Panel(
                    title="Verified around forwards",
                    description="Slots per second; swa has fewer, and must not be 0 while full is not.",
                    queries=(
                        Query(
                            expression=f"rate({rank('swa_slots_verified_total')}{RATE})",
                            legend="rank {{rank}} {{group}}",
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
                    queries=(Query(expression=rank("sweep_progress_ratio"), empty=NO_SWEEP),),
                    unit="percentunit",
                ),
                Panel(
                    title="Sweeps",
                    description="Complete passes by trigger, per second.",
                    queries=(
                        Query(
                            expression=f"rate({rank('sweep_passes_total')}{RATE})",
                            legend="rank {{rank}} {{trigger}}",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Sweep duration",
                    description="Of the current or last sweep; `running` is 1 while one runs.",
                    queries=(
                        Query(expression=rank("sweep_duration_seconds"), empty=NO_SWEEP),
                        Query(expression=rank("sweep_in_progress"), legend="running, " + NAME),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Patrol",
                    description="Progress of the cycle, and cycles completed per hour.",
                    queries=(
                        Query(expression=rank("patrol_progress_ratio")),
                        Query(
                            expression=f"3600 * rate({rank('patrol_cycles_total')}{RATE})",
                            legend="cycles/h, " + NAME,
                        ),
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
                    queries=(Query(expression=rank("pipeline_lag_steps")),),
                ),
                Panel(
                    title="Restarts",
                    description="Engine restarts that the service has observed; counters continue across them.",
                    queries=(Query(expression=rank("restarts_total")),),
                ),
            ),
        ),
    ),
)

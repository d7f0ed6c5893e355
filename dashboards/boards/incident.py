"""Incident: what is damaged, where, and how far the damage reaches."""

from __future__ import annotations

from dashboards.board import (
    BAD_FROM_ONE,
    NO_FAULT,
    NO_HEALING,
    NO_PERTURBATION,
    NO_TAINT,
    TO_DAMAGE_RUNBOOK,
    TO_INCIDENT,
    TO_RANK,
    TO_RUNBOOK,
    TO_TRACE,
    Board,
    Panel,
    PanelType,
    Query,
    Section,
    bands,
    counted,
    firing,
    group,
    over_ranks,
    rank,
    recorded,
    service,
)

NEXT = """
1. Open the incident: `GET /canary/incidents/{id}` (its id is in the table below, in the alert and in the exemplars).
2. Keep it: `canary-obs incident show FILE` reads the bundle offline.
3. Damage spreading? Take the rank out of rotation, then read the runbook linked above.
4. `POST /canary/sweep?wait=true` shows how far the damage reaches; `POST /canary/acknowledge` resolves the alert.
"""

BOARD = Board(
    uid="kv-canary-incident",
    title="KV canary / Incident",
    description="For the person who has been paged.",
    sections=(
        Section(
            title="What to do",
            panels=(
                Panel(
                    title="Next",
                    description="The first four steps.",
                    type=PanelType.TEXT,
                    text=NEXT,
                    height=6,
                ),
                Panel(
                    title="Open incidents",
                    description="By rank the latest that nobody has acknowledged, at most 50; a row links the incident, its trace and the runbook.",
                    queries=(
                        Query(
                            expression='topk(50, kv_canary_incident_info{cluster=~"$cluster",instance=~"$instance"})',
                            legend="",
                            empty=NO_FAULT,
                        ),
                    ),
                    type=PanelType.TABLE,
                    height=6,
                    links=(TO_INCIDENT, TO_TRACE, TO_DAMAGE_RUNBOOK, TO_RANK),
                ),
            ),
        ),
        Section(
            title="What broke",
            panels=(
                Panel(
                    title="Violations in range",
                    description="Count over the chosen time range.",
                    queries=(
                        Query(
                            expression=f"sum({counted(recorded('violations:total'))})",
                            legend="violations",
                        ),
                    ),
                    type=PanelType.STAT,
                    width=6,
                    height=6,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Incidents in range",
                    description="Each burst of violations is one incident.",
                    queries=(
                        Query(
                            expression=f"sum({counted(service('incidents_total'))})",
                            legend="incidents",
                        ),
                    ),
                    type=PanelType.STAT,
                    width=6,
                    height=6,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="Still going on?",
                    description="Violations per second of a rank over the last minute.",
                    queries=bands(recorded("violations:rate1m")),
                    height=6,
                    exemplars=False,
                ),
                Panel(
                    title="By reason",
                    description="chain and position: a row or block table is wrong. kv_data: bytes changed. token: another user's context.",
                    queries=(
                        Query(
                            # Not the recorded series: only the metric itself has exemplars.
                            expression=f"sum by (reason) (rate({group('violations_total')}[$__rate_interval]))",
                            legend="{{reason}}",
                        ),
                    ),
                    exemplars=True,
                ),
                Panel(
                    title="By phase and group",
                    description="head and tail: running requests. sweep and patrol: cached slots.",
                    queries=(
                        Query(
                            expression=f"sum by (phase, group) ({over_ranks('violations:rate1m')})",
                            legend="{{phase}} {{group}}",
                        ),
                    ),
                ),
                Panel(
                    title="Violations so far",
                    description="The 50 highest totals.",
                    queries=(
                        Query(
                            expression=f"topk(50, {group('violations_total')} > 0)",
                            legend="",
                            empty=NO_FAULT,
                        ),
                    ),
                    type=PanelType.TABLE,
                ),
                Panel(
                    title="Damage alerts",
                    description="Firing now.",
                    queries=(Query(expression=f"topk(50, {firing('damage')})", legend="", empty=NO_FAULT),),
                    type=PanelType.TABLE,
                    links=(TO_RUNBOOK,),
                ),
            ),
        ),
        Section(
            title="What is done about it?",
            panels=(
                Panel(
                    title="Healing",
                    description="Actions by outcome; would: in a dry run. GET /canary/heal says what may be done.",
                    queries=(
                        Query(
                            expression=f"topk(36, sum by (action, outcome) ({rank('heals_total')}))",
                            legend="{{action}} {{outcome}}",
                            empty=NO_HEALING,
                        ),
                        Query(
                            expression=f"sum({rank('heal_limited')})",
                            legend="engines that do less than was asked for",
                            empty=NO_HEALING,
                        ),
                    ),
                ),
                Panel(
                    title="Policy followed",
                    description="Engines by healing policy. dry_run where more was asked for: a limit was reached, or no more is allowed.",
                    queries=(
                        Query(
                            expression=f"count by (policy) ({rank('heal_policy')} == 1)",
                            legend="{{policy}}",
                            empty=NO_HEALING,
                        ),
                    ),
                    type=PanelType.TABLE,
                ),
                Panel(
                    title="Blocks in quarantine",
                    description="Share of the pool that healing holds back from requests.",
                    queries=(
                        Query(
                            expression=f"sum by (cluster, instance) ({rank('heal_quarantined_blocks')}) / "
                            f"sum by (cluster, instance) ({rank('heal_pool_blocks')} > 0)",
                            legend="{{instance}}",
                            empty=NO_HEALING,
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Requests that read damage",
                    description="Or KV computed from it. Not all known: GET /canary/tainted says of which damage, and why.",
                    queries=(
                        Query(
                            expression=f"sum by (completeness) ({group('tainted_requests_total')})",
                            legend="{{completeness}}",
                            empty=NO_TAINT,
                        ),
                        Query(
                            expression=f"sum({group('taint_unknown_total')})",
                            legend="damages whose readers are not all known",
                            empty=NO_TAINT,
                        ),
                    ),
                ),
            ),
        ),
        Section(
            title="Is it a drill?",
            panels=(
                Panel(
                    title="Injected faults",
                    description="Injected, detected, masked, missed.",
                    queries=(
                        Query(
                            expression=f"topk(30, sum by (mode, outcome) ({rank('perturbations_total')}))",
                            legend="{{mode}} {{outcome}}",
                            empty=NO_PERTURBATION,
                        ),
                        Query(
                            expression=f"topk(30, sum by (mode) ({rank('perturbations_open')}))",
                            legend="{{mode}} open",
                            empty=NO_PERTURBATION,
                        ),
                    ),
                ),
                Panel(
                    title="Detection latency of injected faults",
                    description="Median and 99th percentile, from injection until the host sees the violation.",
                    queries=tuple(
                        Query(
                            expression=f"histogram_quantile({q}, sum by (le) ({rank('detection_latency_seconds_bucket')}))",
                            legend=f"p{100 * q:g}",
                            empty=NO_PERTURBATION,
                        )
                        for q in (0.5, 0.99)
                    ),
                    unit="s",
                ),
            ),
        ),
    ),
)

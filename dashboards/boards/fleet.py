"""Fleet overview: is anything wrong, and where?"""

from __future__ import annotations

from dashboards.board import (
    BAD_FROM_ONE,
    NO_FAULT,
    Board,
    Panel,
    PanelType,
    Query,
    Section,
    firing,
    group,
    rank,
    recorded,
    service,
)


def _count(title: str, state: str, description: str) -> Panel:
    expression = f'sum({rank("state", f"""state="{state}" """.strip())})'
    steps = BAD_FROM_ONE if state in ("violated", "blind", "degraded") else ()
    query = Query(expression=expression, legend=state)
    return Panel(
        title=title, description=description, queries=(query,), type=PanelType.STAT, width=4, height=4,
        steps=steps or Panel(title="", description="").steps,
    )  # fmt: skip


BOARD = Board(
    uid="kv-canary-fleet",
    title="KV canary / Fleet",
    description="The state of every rank. Whether green can be trusted is on the dashboard 'Can green be trusted?'.",
    sections=(
        Section(
            title="Verdicts",
            panels=(
                _count("Ranks violated", "violated", "A check failed and nobody has acknowledged it."),
                _count("Ranks blind", "blind", "The canary cannot check, or does not report."),
                _count("Ranks degraded", "degraded", "The protection is weaker than configured."),
                _count("Ranks ok", "ok", "Checked, with coverage and ages within their targets."),
                _count("Ranks off", "off", "Detached or not yet ready."),
                Panel(
                    title="Alerts firing",
                    description="Number of firing alerts; each links to its runbook in Alertmanager.",
                    queries=(
                        Query(
                            expression=f"count({firing('damage|blind|debt')}) or vector(0)", legend="alerts"
                        ),
                    ),
                    type=PanelType.STAT,
                    width=4,
                    height=4,
                    steps=BAD_FROM_ONE,
                ),
                Panel(
                    title="State of every rank",
                    description="The state over time.",
                    queries=(
                        Query(
                            expression=f"{rank('state')} == 1", legend="{{instance}} rank {{rank}}: {{state}}"
                        ),
                    ),
                    type=PanelType.STATES,
                    width=24,
                ),
            ),
        ),
        Section(
            title="Damage",
            panels=(
                Panel(
                    title="Violations by reason",
                    description="New violations per second; exemplars carry the incident and its trace.",
                    queries=(
                        Query(
                            expression=f"sum by (instance, reason) (rate({group('violations_total')}[$__rate_interval]))",
                            legend="{{instance}}: {{reason}}",
                        ),
                    ),
                    exemplars=True,
                ),
                Panel(
                    title="Firing now",
                    description="Firing alerts by rank.",
                    queries=(Query(expression=firing("damage|blind|debt"), legend="", empty=NO_FAULT),),
                    type=PanelType.TABLE,
                ),
            ),
        ),
        Section(
            title="Work",
            panels=(
                Panel(
                    title="Slots verified",
                    description="Records checked per second.",
                    queries=(
                        Query(
                            expression=f"sum by (engine, instance, rank) (rate({group('slots_verified_total')}[$__rate_interval]))"
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="KV bytes compared",
                    description="Bytes re-read and compared with their fingerprint, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (engine, instance, rank) (rate({group('bytes_verified_total')}[$__rate_interval]))"
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="Overhead",
                    description="Host time of the canary over step time.",
                    queries=(Query(expression=recorded("overhead:ratio5m")),),
                    unit="percentunit",
                ),
                Panel(
                    title="Releases",
                    description="Service releases; ranks by engine version, mode and backend.",
                    queries=(
                        Query(
                            expression=f"count by (engine, engine_version, mode, backend) ({rank('rank_info')})",
                            legend="",
                        ),
                        Query(expression=service("build_info"), legend=""),
                    ),
                    type=PanelType.TABLE,
                ),
            ),
        ),
    ),
)

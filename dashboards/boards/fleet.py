"""Fleet overview: is anything wrong, and where?"""

from __future__ import annotations

from dashboards.board import (
    AMBER,
    BAD_FROM_ONE,
    GREEN,
    GREY,
    NO_FAULT,
    RED,
    TO_ENGINE,
    TO_INCIDENTS,
    TO_RANK,
    TO_RUNBOOK,
    VIOLET,
    Board,
    Column,
    Panel,
    PanelType,
    Query,
    Section,
    Step,
    bands,
    firing,
    over_ranks,
    rank,
    recorded,
    service,
)

_STEPS = {
    "violated": (Step(colour=GREEN), Step(colour=RED, value=1)),
    "blind": (Step(colour=GREEN), Step(colour=VIOLET, value=1)),
    "degraded": (Step(colour=GREEN), Step(colour=AMBER, value=1)),
    "ok": (Step(colour=GREY), Step(colour=GREEN, value=1)),
    "off": (Step(colour=GREY),),
}
_NOT_OK = f"topk(50, {recorded('state:severity')} > 1)"


def _count(title: str, state: str, description: str) -> Panel:
    expression = f'sum({rank("state", f"""state="{state}" """.strip())})'
    query = Query(expression=expression, legend=state)
    return Panel(
        title=title, description=description, queries=(query,), type=PanelType.STAT, width=4, height=4,
        steps=_STEPS[state],
    )  # fmt: skip


def _engine(worst: str, expression: str, empty: str = "") -> Query:
    return Query(expression=f"{worst} without (rank) ({expression})", legend="", empty=empty)


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
                    title="Engines, worst first",
                    description="The worst rank of each engine; a row links the engine and its incidents.",
                    queries=(
                        Query(expression=over_ranks("state:severity"), legend=""),
                        _engine("count", f"{recorded('state:severity')} > 1", NO_FAULT),
                        _engine("sum", recorded("violations:rate1m")),
                        _engine("min", recorded("coverage:ratio")),
                        _engine("max", recorded("sweep_age:seconds")),
                        _engine("max", rank("snapshot_age_seconds")),
                        _engine("max", recorded("overhead:ratio5m")),
                    ),
                    type=PanelType.TABLE,
                    width=24,
                    columns=(
                        Column(title="State", severity=True),
                        Column(title="Ranks not ok"),
                        Column(title="Violations/s"),
                        Column(title="Coverage", unit="percentunit"),
                        Column(title="Sweep age", unit="s"),
                        Column(title="Silent for", unit="s"),
                        Column(title="Overhead", unit="percentunit"),
                    ),
                    links=(TO_ENGINE, TO_INCIDENTS),
                ),
                Panel(
                    title="State of every engine",
                    description="Of its worst rank, over time.",
                    queries=(
                        Query(expression=over_ranks("state:severity"), legend="{{engine}}/{{instance}}"),
                    ),
                    type=PanelType.STATES,
                    severity=True,
                ),
                Panel(
                    title="Ranks that are not ok, worst first",
                    description="At most 50; a row links the rank on the Engine dashboard and the engine's incidents.",
                    queries=(
                        Query(expression=_NOT_OK, legend="", empty=NO_FAULT),
                        Query(
                            expression=f"{rank('snapshot_age_seconds')} and on (cluster, engine, instance, rank) {_NOT_OK}",
                            legend="",
                            empty=NO_FAULT,
                        ),
                        Query(
                            expression=f"{recorded('violations:total')} and on (cluster, engine, instance, rank) {_NOT_OK}",
                            legend="",
                            empty=NO_FAULT,
                        ),
                    ),
                    type=PanelType.TABLE,
                    columns=(
                        Column(title="State", severity=True),
                        Column(title="Silent for", unit="s"),
                        Column(title="Violations"),
                    ),
                    links=(TO_RANK, TO_INCIDENTS),
                ),
            ),
        ),
        Section(
            title="Damage",
            panels=(
                Panel(
                    title="Violations by reason",
                    description="New violations per second, of the last minute.",
                    queries=(
                        Query(
                            expression=f"sum by (reason) ({over_ranks('violations:rate1m')})",
                            legend="{{reason}}",
                        ),
                    ),
                ),
                Panel(
                    title="Firing now",
                    description="At most 50 firing alerts; a row links the runbook and the engine.",
                    queries=(
                        Query(
                            expression=f"topk(50, {firing('damage|blind|debt')})", legend="", empty=NO_FAULT
                        ),
                    ),
                    type=PanelType.TABLE,
                    links=(TO_RUNBOOK, TO_ENGINE),
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
                            expression=f"sum by (phase) ({over_ranks('slots_verified:rate1m')})",
                            legend="{{phase}}",
                        ),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="KV bytes compared",
                    description="Bytes re-read and compared with their fingerprint, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (phase) ({over_ranks('bytes_verified:rate1m')})",
                            legend="{{phase}}",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="Overhead",
                    description="Host time of the canary over step time.",
                    queries=bands(recorded("overhead:ratio5m")),
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

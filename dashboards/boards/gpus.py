"""GPUs of a fleet: which part is failing, and what its driver says."""

from __future__ import annotations

from dashboards.board import BAD_FROM_ONE, SERVICE, Board, Panel, PanelType, Query, Section, service

NO_GPU = "only where the service samples GPUs"
NO_DEVICE_NEWS = "only where a driver, or dcgm-exporter, says something bad"


def _table(title: str, description: str, *queries: Query, width: int = 8) -> Panel:
    return Panel(title=title, description=description, queries=queries, type=PanelType.TABLE, width=width)


def _device(title: str, name: str, description: str) -> Panel:
    """GPUs of which their driver says so; the rules leave out those with a 0."""
    expression = f"topk(100, gpu:kv_canary_device_{name}{{{SERVICE}}})"
    return _table(title, description, Query(expression=expression, legend="", empty=NO_DEVICE_NEWS))


DEVICES = Section(
    title="What drivers say",
    panels=(
        _table(
            "GPUs sampled",
            "GPUs whose health the service read within the last minute, by model and driver; not dcgm-exporter's.",
            Query(
                expression=f"count by (gpu_model, driver_version) ({service('device_info')})",
                legend="",
                empty=NO_GPU,
            ),
            Query(
                expression=f"time() - min({service('device_sampled_timestamp_seconds')})",
                legend="oldest sample",
                empty=NO_GPU,
            ),
        ),
        _device(
            "Xids",
            "xid_events:sum",
            "Xid errors since the service listens, by GPU and number; of dcgm-exporter the last one.",
        ),
        _device(
            "Memory errors",
            "uncorrectable:sum",
            "Uncorrectable memory errors: since the driver was loaded, and over the GPU's life.",
        ),
        _device(
            "Remapped rows",
            "remapped_rows:max",
            "Rows replaced by spare ones, by error; on AMD retired pages.",
        ),
        _device("Remaps pending", "remap_pending:max", "A reset of the GPU completes them."),
        _device("Remaps failed", "remap_failed:max", "No spare rows are left: the GPU should be replaced."),
        _device("SRAM beyond its threshold", "sram_threshold_exceeded:max", "The GPU should be replaced."),
        _device("Recovery actions", "recovery:group", "What drivers ask for, other than nothing."),
        _table(
            "Errors by block",
            "AMD: errors since the driver was loaded; umc is memory, xgmi_wafl the links between GPUs.",
            Query(
                expression="topk(100, max by (gpu_uuid, block, error) ("
                f"{service('device_block_errors_total')} > 0))",
                legend="",
                empty=NO_DEVICE_NEWS,
            ),
        ),
        Panel(
            title="Throttled",
            description="GPUs whose clocks are held down, by reason.",
            queries=(
                Query(
                    expression=f"gpu:kv_canary_device_throttled:count{{{SERVICE}}}",
                    legend="{{reason}}",
                    empty=NO_DEVICE_NEWS,
                ),
            ),
            width=8,
        ),
    ),
)

NO_SUSPECT = "only while findings of seven days are known"


def _findings(title: str, expression: str, description: str) -> Panel:
    return _table(title, description, Query(expression=expression, legend="", empty=NO_SUSPECT))


def _number(title: str, expression: str, description: str) -> Panel:
    query = Query(expression=f"{expression} or vector(0)", legend=title)
    return Panel(
        title=title, description=description, queries=(query,), type=PanelType.STAT, width=6, height=4,
        steps=BAD_FROM_ONE,
    )  # fmt: skip


VERDICTS = Section(
    title="Verdicts of seven days",
    panels=(
        _number("Suspect GPUs", "count(gpu:kv_canary_suspect:score)", "Drain, reset, return them."),
        _number(
            "Suspect releases", "count(release:kv_canary_suspect:gpus)", "Go back to the release before."
        ),
        _number("Suspect links", "count(gpu:kv_canary_link:periods7d)", "Look at the NIC and the cable."),
        Panel(
            title="GPUs judged",
            description="GPUs that verified bytes within seven days.",
            queries=(
                Query(expression="sum(release:kv_canary_gpus:count7d)", legend="GPUs", empty=NO_SUSPECT),
            ),
            type=PanelType.STAT,
            width=6,
            height=4,
        ),
        _findings(
            "Verdicts",
            "topk(100, gpu:kv_canary_verdict:periods7d)",
            "GPUs with findings: what they point to, and in how many periods of six hours there were new ones.",
        ),
        _findings(
            "Scores",
            "topk(100, gpu:kv_canary_score:decades)",
            "By how many decades chance is unlikely, raised by memory Xids and remapped rows.",
        ),
        _findings(
            "Expected",
            "topk(100, gpu:kv_canary_expected:periods7d)",
            "What peers predict for the bytes that the GPU verified.",
        ),
        _findings(
            "Flipped bits",
            'topk(100, sum by (instance, rank, bit, direction) (kv_canary_changed_bits_total{cluster=~"$cluster"}))',
            "Bits that changed in damaged slots: one position in one direction is a stuck line or cell.",
        ),
        _findings(
            "Findings by release",
            "topk(100, release:kv_canary_finding_periods:sum7d)",
            "Periods of six hours with findings, of each GPU three at most.",
        ),
        _findings(
            "Bytes verified by release",
            "topk(100, release:kv_canary_bytes_verified:sum7d)",
            "What findings are compared with.",
        ),
    ),
)

BOARD = Board(
    uid="kv-canary-gpus",
    title="KV canary / GPUs",
    description="Software bugs spread over a fleet, failing parts do not.",
    sections=(VERDICTS, DEVICES),
)

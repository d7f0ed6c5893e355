"""GPUs of a fleet: which part is failing, and what its driver says."""

from __future__ import annotations

from dashboards.board import BAD_FROM_ONE, SERVICE, Board, Panel, PanelType, Query, Section, service

NO_GPU = "only where the service samples GPUs"


def _device(title: str, name: str, description: str, *, by: str = "") -> Panel:
    expression = f"topk(100, max by (gpu_uuid{by}) ({service(f'device_{name}')} > 0))"
    return Panel(
        title=title,
        description=description,
        queries=(Query(expression=expression, legend="", empty=NO_GPU),),
        type=PanelType.TABLE,
        width=8,
    )


DEVICES = Section(
    title="What drivers say",
    panels=(
        Panel(
            title="GPUs sampled",
            description="GPUs whose health was read within the last minute, by model and driver.",
            queries=(
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
            type=PanelType.TABLE,
            width=8,
        ),
        Panel(
            title="Xids",
            description="Xid errors since the service listens, by GPU and number.",
            queries=(
                Query(
                    expression=f"topk(100, gpu:kv_canary_device_xid_events:sum{{{SERVICE}}})",
                    legend="",
                    empty=NO_GPU,
                ),
            ),
            type=PanelType.TABLE,
            width=8,
            steps=BAD_FROM_ONE,
        ),
        Panel(
            title="Memory errors",
            description="Uncorrectable memory errors: since the driver was loaded, and over the GPU's life.",
            queries=(
                Query(
                    expression=f"topk(100, gpu:kv_canary_device_uncorrectable:sum{{{SERVICE}}})",
                    legend="",
                    empty=NO_GPU,
                ),
            ),
            type=PanelType.TABLE,
            width=8,
        ),
        _device(
            "Remapped rows", "remapped_rows_total", "Rows replaced by spare ones, by error.", by=", error"
        ),
        _device("Remaps pending", "remap_pending", "A reset of the GPU completes them."),
        _device("Remaps failed", "remap_failed", "No spare rows are left: the GPU should be replaced."),
        _device("SRAM beyond its threshold", "sram_threshold_exceeded", "The GPU should be replaced."),
        Panel(
            title="Recovery actions",
            description="What drivers ask for, other than nothing.",
            queries=(
                Query(
                    expression=f"topk(100, gpu:kv_canary_device_recovery:group{{{SERVICE}}})",
                    legend="",
                    empty=NO_GPU,
                ),
            ),
            type=PanelType.TABLE,
            width=8,
        ),
        Panel(
            title="Throttled",
            description="GPUs whose clocks are held down, by reason.",
            queries=(
                Query(
                    expression=f"gpu:kv_canary_device_throttled:count{{{SERVICE}}}",
                    legend="{{reason}}",
                    empty=NO_GPU,
                ),
            ),
            width=8,
        ),
    ),
)

NO_SUSPECT = "only while findings of seven days are known"


def _of_gpu(title: str, name: str, description: str, legend: str = "") -> Panel:
    query = Query(expression=name, legend=legend, empty=NO_SUSPECT)
    return Panel(title=title, description=description, queries=(query,), type=PanelType.TABLE, width=8)


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
        _of_gpu(
            "Verdicts",
            "topk(100, gpu:kv_canary_verdict:periods7d)",
            "GPUs with findings: what they point to, and in how many periods of six hours there were new ones.",
        ),
        _of_gpu(
            "Scores",
            "topk(100, gpu:kv_canary_score:decades)",
            "By how many decades chance is unlikely, raised by memory Xids and remapped rows.",
        ),
        _of_gpu(
            "Expected",
            "topk(100, gpu:kv_canary_expected:periods7d)",
            "What peers predict for the bytes that the GPU verified.",
        ),
        _of_gpu(
            "Flipped bits",
            'topk(100, sum by (instance, rank, bit, direction) (kv_canary_changed_bits_total{cluster=~"$cluster"}))',
            "Bits that changed in damaged slots: one position in one direction is a stuck line or cell.",
        ),
        _of_gpu(
            "Findings by release",
            "topk(100, release:kv_canary_finding_periods:sum7d)",
            "Periods of six hours with findings, of each GPU three at most.",
        ),
        _of_gpu(
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

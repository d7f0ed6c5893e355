"""GPUs of a fleet: which part is failing, and what its driver says."""

from __future__ import annotations

from dashboards.board import BAD_FROM_ONE, Board, Panel, PanelType, Query, Section, counted, service

NO_GPU = "only where the service samples GPUs"
_LOST, _ASKED = 'error="uncorrectable"', 'action!="none"'


def _device(title: str, name: str, description: str, *, by: str = "") -> Panel:
    expression = f"max by (gpu_uuid{by}) ({service(f'device_{name}')}) > 0"
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
            description="Xid errors within the time range, by GPU and number.",
            queries=(
                Query(
                    expression=f"sum by (gpu_uuid, xid) ({counted(service('device_xid_events_total'))}) > 0",
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
            description="Uncorrectable memory errors within the time range.",
            queries=(
                Query(
                    expression=f"sum by (gpu_uuid, counter) ({counted(service('device_ecc_errors_total', _LOST))}) > 0",
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
                    expression=f"max by (gpu_uuid, action) ({service('device_recovery_action', _ASKED)}) > 0",
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
                    expression=f"count by (reason) ({service('device_throttled')} > 0)",
                    legend="{{reason}}",
                    empty=NO_GPU,
                ),
            ),
            width=8,
        ),
    ),
)

BOARD = Board(
    uid="kv-canary-gpus",
    title="KV canary / GPUs",
    description="Software bugs spread over a fleet, failing parts do not.",
    sections=(DEVICES,),
)

"""Pages of dcgm-exporter as it prints them, up to 4.8 and from 4.9, served over HTTP.

Families, labels, their order and the form of numbers are those of its template and counters.csv, with the
optional counters of device health turned on (NVIDIA/dcgm-exporter: internal/pkg/rendermetrics,
etc/default-counters.csv; pull request 326 for pci_bus_id, err_code, err_msg). A blank value has no line.
Under MIG each instance has lines of its own, with the card's UUID. From 4.8.3 on the host's label is
`hostname`, from 4.9 on fields have DCGM's newer names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What a release calls things; `fields`: the names that changed, by our own."""

    host: str
    driver: str
    fields: dict[str, str]


UP_TO_4_8 = Naming(
    host="Hostname",
    driver="DCGM_FI_DRIVER_VERSION",
    fields={
        "xid": "DCGM_FI_DEV_XID_ERRORS",
        "remapped_uncorrectable": "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "remapped_correctable": "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "remap_failed": "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    },
)
FROM_4_9 = Naming(
    host="hostname",
    driver="DCGM_FI_SYSTEM_DRIVER_VERSION",
    fields={
        "xid": "DCGM_FI_DEV_XID_ERROR",
        "remapped_uncorrectable": "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL",
        "remapped_correctable": "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL",
        "remap_failed": "DCGM_FI_DEV_ROW_REMAP_FAILED",
    },
)
NAMINGS = {"up_to_4_8": UP_TO_4_8, "from_4_9": FROM_4_9}
# The same in both.
_FIELDS = {
    "sbe_volatile": "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
    "dbe_volatile": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "sbe_aggregate": "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
    "dbe_aggregate": "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
    "sram_exceeded": "DCGM_FI_DEV_SRAM_EXCEEDED",
    "remap_pending": "DCGM_FI_DEV_ROW_REMAP_PENDING",
    "recovery_action": "DCGM_FI_DEV_GPU_RECOVERY_ACTION",
    "clock_reasons": "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
    "temperature": "DCGM_FI_DEV_GPU_TEMP",
    "power": "DCGM_FI_DEV_POWER_USAGE",
}
_COUNTERS = frozenset(
    {"remapped_uncorrectable", "remapped_correctable", "sbe_volatile", "dbe_volatile", "sbe_aggregate",
     "dbe_aggregate"}
)  # fmt: skip
_DOUBLES = frozenset({"power"})  # DCGM has them as floating point, and the exporter prints six digits
# What healthy GPUs say.
HEALTHY: dict[str, float] = {
    **dict.fromkeys((*UP_TO_4_8.fields, *_FIELDS), 0), "clock_reasons": 1, "temperature": 31, "power": 77.194,
}  # fmt: skip
_XIDS = {
    0: "No Error",
    48: "Double Bit ECC Error",
    63: "ECC page retirement or row remapping recording event",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, or one MIG instance of it. `values` differ from HEALTHY; None = blank, as where ECC is off."""

    uuid: str
    bus: str
    model: str = "NVIDIA H200"
    driver: str = "580.95.05"
    profile: str = ""  # MIG: "1g.18gb"
    instance: str = ""  # MIG: number of the GPU instance
    values: dict[str, float | None] = field(default_factory=dict)


def page(naming: Naming, gpus: Sequence[Gpu], host: str) -> str:
    """The page of one node; GPUs are numbered in their order, instances of a card share its number."""
    return "".join(f"{line}\n" for line in _lines(naming, gpus, host))


def _lines(naming: Naming, gpus: Sequence[Gpu], host: str) -> Iterator[str]:
    numbers = {uuid: number for number, uuid in enumerate(dict.fromkeys(gpu.uuid for gpu in gpus))}
    for own, name in {**naming.fields, **_FIELDS}.items():
        rows = [(gpu, gpu.values.get(own, HEALTHY[own])) for gpu in gpus]
        known = [(gpu, value) for gpu, value in rows if value is not None]
        if not known:
            continue
        yield f"# HELP {name} The field {own} of DCGM."
        yield f"# TYPE {name} {'counter' if own in _COUNTERS else 'gauge'}"
        for gpu, value in known:
            labels = _labels(naming, gpu, numbers[gpu.uuid], host)
            if own == "xid":
                labels |= {"err_code": f"{value:.0f}", "err_msg": _XIDS.get(int(value), "Unknown Error")}
            text = ",".join(f'{label}="{content}"' for label, content in labels.items())
            yield f"{name}{{{text}}} {f'{value:f}' if own in _DOUBLES else int(value)}"


def _labels(naming: Naming, gpu: Gpu, number: int, host: str) -> dict[str, str]:
    labels = {"gpu": str(number), "UUID": gpu.uuid, "pci_bus_id": gpu.bus, "device": f"nvidia{number}"}
    labels["modelName"] = gpu.model
    if gpu.profile:
        labels |= {"GPU_I_PROFILE": gpu.profile, "GPU_I_ID": gpu.instance}
    return labels | {naming.host: host, naming.driver: gpu.driver}


class Exporter:
    """Serves one page at /metrics on loopback; `text` may be replaced at any time."""

    def __init__(self, text: str) -> None:
        self.text = text
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(exporter.text.encode())

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

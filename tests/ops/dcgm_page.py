"""Pages of dcgm-exporter, up to 4.8 and from 4.9, served over HTTP.

Names, labels and their order are those of pages that users posted: NVIDIA/dcgm-exporter pull request 326
(pci_bus_id; err_code and err_msg of the last Xid), issue 317 (models), and one with the driver as a label.
From 4.8.3 on the host's label is `hostname`, from 4.9 on fields have DCGM's newer names. Values are invented.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Xid, remaps of uncorrectable errors, failed remaps; the labels of the host and of the driver.
UP_TO_4_8 = (
    "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "Hostname", "DCGM_FI_DRIVER_VERSION",
)  # fmt: skip
FROM_4_9 = (
    "DCGM_FI_DEV_XID_ERROR", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "DCGM_FI_DEV_ROW_REMAP_FAILED",
    "hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION",
)  # fmt: skip


def page(names: Sequence[str], gpus: Sequence[tuple[str, str]], host: str, failing: str) -> str:
    """`gpus`: UUIDs and PCI addresses; the remaps of `failing` fail, and its last Xid is 64."""
    return "\n".join(_lines(names, gpus, host, failing)) + "\n"


def _lines(names: Sequence[str], gpus: Sequence[tuple[str, str]], host: str, failing: str) -> Iterator[str]:
    xid, remapped, failed, host_label, driver_label = names
    kinds = {xid: "gauge", remapped: "counter", failed: "gauge", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "counter"}
    for (name, kind), value in zip(kinds.items(), (64, 8, 1, 0), strict=True):
        yield f"# HELP {name} As dcgm-exporter's counters.csv says."
        yield f"# TYPE {name} {kind}"
        for number, (uuid, bus) in enumerate(gpus):
            own = value if uuid == failing else 0
            labels = (
                f'gpu="{number}",UUID="{uuid}",pci_bus_id="{bus}",device="nvidia{number}",'
                f'modelName="NVIDIA H200",{host_label}="{host}",{driver_label}="580.95.05"'
            )
            if name == xid:
                labels += f',err_code="{own}",err_msg="No Error"'
            yield f"{name}{{{labels}}} {own}"


class Exporter:
    """Serves one page at /metrics on loopback."""

    def __init__(self, text: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

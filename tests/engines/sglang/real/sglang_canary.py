"""What SGLang's own canary finds, by its log."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

_LOGGER = "sglang.srt.kv_canary.runner.violation_reporter"
# By SGLang's test helpers a frozen format.
_LINE = re.compile(
    r"kv_canary violation: launch_tag=(HEAD|TAIL|SWEEP)_([KV])_(FULL|SWA) fail_reason=(\S+) slot_idx=(-?\d+)"
)
SETTINGS: dict[str, Any] = {
    "kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 4, "max_total_tokens": 1200,
}  # fmt: skip
# What it leaves off by default: V, and tokens.
MORE = {"SGLANG_KV_CANARY_ENABLE_MHA_V": "1", "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1"}


@dataclass(frozen=True, slots=True)
class Line:
    """One violation as it is logged."""

    phase: str
    part: str
    group: str
    reason: str
    slot: int


class OwnLog(logging.Handler):
    """Collects the violations that SGLang's canary logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def __enter__(self) -> OwnLog:
        log = logging.getLogger(_LOGGER)
        log.addHandler(self)
        log.propagate = False  # hundreds of lines per fault
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """One record is one violation, in several lines."""
        found = _LINE.match(record.getMessage())
        assert found is not None, record.getMessage()
        phase, part, group, reasons, slot = found.groups()
        self.lines += [
            Line(phase.lower(), part.lower(), group.lower(), reason, int(slot))
            for reason in reasons.split("+")
        ]


def logged_rows(scheduler: Any) -> int:
    """Violations it has counted; only so many rows are ever logged."""
    log = scheduler.tp_worker.model_runner.canary_manager._device_state.violation_log
    return int(log.violation_write_index)


def most_rows(scheduler: Any) -> int:
    """Rows that it logs in an engine's life."""
    return int(
        scheduler.tp_worker.model_runner.canary_manager._device_state.violation_log.violation_ring.shape[0]
    )

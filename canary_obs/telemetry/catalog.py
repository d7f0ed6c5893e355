"""The metric catalogue: a row per metric with name, type, unit, labels, help and reading function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from canary_obs.hub.ranks import RankView
from canary_obs.telemetry import (
    device_readings,
    forward_readings,
    heal_readings,
    load_readings,
    readings,
    service_readings,
    taint_readings,
)
from canary_obs.telemetry.readings import Histogram, Reading
from canary_obs.telemetry.service_readings import ServiceView

PREFIX = "kv_canary_"
RANK_LABELS = ("engine", "instance", "rank")


class MetricType(StrEnum):
    """Prometheus metric type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric family. Names of counters end in `_total`; `unit` is the base unit, or empty."""

    name: str
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetric(Metric):
    """A family with series for every rank; `labels` follow RANK_LABELS."""

    read: Callable[[RankView], Iterable[Reading | Histogram]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceMetric(Metric):
    """A family of the service itself."""

    read: Callable[[ServiceView], Iterable[Reading]]


def _rank(
    metric_type: MetricType,
    name: str,
    unit: str,
    labels: str,
    text: str,
    read: Callable[[RankView], Iterable[Reading | Histogram]],
) -> RankMetric:
    names = tuple(labels.split())
    return RankMetric(name=PREFIX + name, type=metric_type, unit=unit, labels=names, help=text, read=read)


def _service(
    metric_type: MetricType,
    name: str,
    unit: str,
    labels: str,
    text: str,
    read: Callable[[ServiceView], Iterable[Reading]],
) -> ServiceMetric:
    names = tuple(labels.split())
    return ServiceMetric(name=PREFIX + name, type=metric_type, unit=unit, labels=names, help=text, read=read)


_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

# fmt: off
# ruff: noqa: E501 - one row per metric reads better than five lines each
RANK_METRICS: tuple[RankMetric, ...] = (
    _rank(_G, "state", "", "state", "1 for the rank's current state, 0 for the others.", readings.state),
    _rank(_G, "rank_info", "", "mode backend engine_version device model node gpu_uuid pci_bus_id gpu_model gpu_instance driver_version", "What the rank runs and on which GPU, which labels spell as dcgm-exporter does; what is unknown has no label; always 1.", readings.rank_info),
    _rank(_G, "snapshot_age_seconds", "seconds", "", "Age of the rank's latest snapshot.", readings.snapshot_age),
    _rank(_G, "clock_skew_seconds", "seconds", "", "The engine's wall clock minus the service's; no check depends on it.", readings.clock_skew),
    _rank(_G, "step_under_way_seconds", "seconds", "", "How long an engine step has lasted that delays the rank's snapshots; absent without one.", readings.step_under_way),
    _rank(_G, "paused", "", "", "1 while sweeps and patrol are paused.", readings.paused),
    _rank(_C, "restarts_total", "", "", "Engine restarts that the service has observed.", readings.restarts),
    _rank(_C, "steps_total", "", "", "Forward steps observed.", readings.steps),
    _rank(_C, "forwards_total", "", "group", "Forwards with tokens, as the engine counts them itself.", forward_readings.forwards),
    _rank(_C, "forwards_checked_total", "", "group", "Forwards whose checks were launched, or whose slots were declared unverified.", forward_readings.forwards_checked),
    _rank(_C, "captures_total", "", "outcome", "Captures of a repeating batch's checks as one launch, on a GPU as a CUDA graph; after one that failed, checks are launched one by one.", forward_readings.captures),
    _rank(_C, "replays_total", "", "", "Launches that did what was captured: at most two per forward.", forward_readings.replays),
    _rank(_C, "step_seconds_total", "seconds", "", "Engine time between step starts.", readings.step_seconds),
    _rank(_C, "overhead_seconds_total", "seconds", "phase", "Host time that the canary took on the engine's thread, by hook; scheduler (vLLM): in the scheduler, reported by every rank.", readings.overhead),
    _rank(_C, "kernel_runs_total", "", "group phase", "Check launches that finished.", readings.kernel_runs),
    _rank(_G, "kernel_healthy", "", "group phase", "1 if every launched check has finished.", readings.kernel_healthy),
    _rank(_C, "slots_verified_total", "", "group phase", "Slots whose record was checked.", readings.verified),
    _rank(_C, "slots_hashed_total", "", "group phase", "Slots whose KV bytes were compared with their fingerprint.", readings.hashed),
    _rank(_C, "bytes_verified_total", "", "group phase", "KV bytes compared with their fingerprint.", readings.bytes_verified),
    _rank(_C, "slots_unverified_total", "", "group cause", "Slots that were due for a check and could not be checked.", readings.unverified),
    _rank(_C, "slots_written_total", "", "group", "Slots whose record got a new identity.", readings.written),
    _rank(_C, "slots_completed_total", "", "group", "Slots whose record got a fingerprint.", readings.completed),
    _rank(_C, "loads_compared_total", "", "group", "Slots loaded by a KV connector that were compared with the records of what was sent.", load_readings.loads_compared),
    _rank(_C, "loads_left_out_total", "", "group", "Slots loaded by a KV connector of which no record was known.", load_readings.loads_left_out),
    _rank(_C, "violations_total", "", "group phase reason", "Findings of failed checks, each where it was found first.", readings.violations),
    _rank(_C, "redetections_total", "", "group reason", "Failed checks of findings that were counted before: damage that is still there.", readings.redetections),
    _rank(_C, "tainted_requests_total", "", "group completeness", "Requests that read damage, or KV computed from it; completeness unknown: there may be more of them.", taint_readings.requests),
    _rank(_C, "taint_unknown_total", "", "group", "Damages of which it is not known who has read them.", taint_readings.unknown),
    _rank(_C, "violation_events_dropped_total", "", "", "Violation rows lost before they reached the service; they are still counted.", readings.events_dropped),
    _rank(_C, "sweep_passes_total", "", "trigger", "Complete sweeps.", readings.sweep_passes),
    _rank(_G, "sweep_in_progress", "", "", "1 while a sweep is running.", readings.sweep_running),
    _rank(_G, "sweep_progress_ratio", "ratio", "", "Share of its slots that the current or last sweep has checked or skipped.", readings.sweep_progress),
    _rank(_G, "sweep_duration_seconds", "seconds", "", "Duration of the current or last sweep.", readings.sweep_duration),
    _rank(_G, "sweep_last_completed_timestamp_seconds", "seconds", "", "End of the last complete sweep.", readings.last_sweep),
    _rank(_G, "patrol_progress_ratio", "ratio", "", "Completed share of the current patrol cycle.", readings.patrol_progress),
    _rank(_C, "patrol_cycles_total", "", "", "Complete patrol cycles.", readings.patrol_cycles),
    _rank(_G, "patrol_cycle_seconds", "seconds", "", "Duration of the last complete patrol cycle.", readings.patrol_cycle),
    _rank(_G, "patrol_oldest_check_seconds", "seconds", "", "Age of the oldest byte check.", readings.patrol_oldest),
    _rank(_G, "patrol_budget_bytes_per_second", "", "", "Bytes the patrol may read per second.", readings.patrol_budget),
    _rank(_G, "pool_bytes", "bytes", "group", "KV bytes in the pool.", readings.pool_bytes),
    _rank(_G, "protected_bytes", "bytes", "group", "KV bytes in the pool that fingerprints cover.", readings.protected_bytes),
    _rank(_G, "allocated_bytes", "bytes", "", "KV bytes that the engine has allocated, by its own configuration and memory.", readings.allocated_bytes),
    _rank(_G, "record_bytes", "bytes", "", "Device memory of the records.", readings.record_bytes),
    _rank(_G, "pipeline_lag_steps", "", "", "Steps between the device's counters and the host's copy.", readings.lag_steps),
    _rank(_G, "pipeline_lag_seconds", "seconds", "", "Age of the host's copy of the counters.", readings.lag_seconds),
    _rank(_C, "pipeline_skipped_total", "", "", "Steps whose counters were not copied because the ring was full.", readings.skipped),
    _rank(_G, "swa_index_divergence", "", "", "Live tokens whose full and sliding-window slots have different indices.", readings.swa_diverging),
    _rank(_G, "swa_out_of_window_tokens", "", "", "Live tokens of the full group without a sliding-window slot.", readings.swa_out_of_window),
    _rank(_C, "swa_slots_verified_total", "", "group", "Slots verified around forwards in the full and in the sliding-window groups; the minimum over groups of a kind.", readings.swa_verified),
    _rank(_C, "perturbations_total", "", "mode outcome", "Faults injected on purpose, by outcome.", readings.perturbations),
    _rank(_G, "perturbations_open", "", "mode", "Injected faults without an outcome yet.", readings.perturbations_open),
    _rank(_C, "heals_total", "", "action outcome", "Actions of healing; the rank that speaks for its engine's scheduler counts them.", heal_readings.actions),
    _rank(_G, "heal_policy", "", "policy", "1 for the healing policy that is followed, 0 for the others.", heal_readings.policy),
    _rank(_G, "heal_limited", "", "", "1 while less is done about damage than was asked for: a limit was reached, or this engine allows no more.", heal_readings.limited),
    _rank(_G, "heal_pool_blocks", "", "", "Blocks of the engine's pool, once healing knows them.", heal_readings.pool_blocks),
    _rank(_G, "heal_quarantined_blocks", "", "", "Blocks that healing holds back from requests.", heal_readings.quarantined),
    _rank(_H, "detection_latency_seconds", "seconds", "mode", "Time from injecting a fault until the host sees its violation.", readings.detection_latency),
    _rank(_C, "observer_faults_total", "", "part", "Exceptions caught in the canary, by part.", readings.observer_faults),
    _rank(_C, "messages_dropped_total", "", "", "Messages that the rank could not send to the service; a snapshot that a later one replaces is none.", readings.messages_dropped),
)

SERVICE_METRICS: tuple[ServiceMetric, ...] = (
    _service(_G, "build_info", "", "version", "Version of the service; always 1.", service_readings.build_info),
    _service(_G, "service_state", "", "state", "1 for the verdict over all ranks, 0 for the others.", service_readings.service_state),
    _service(_G, "ranks", "", "state", "Ranks known, by state.", service_readings.ranks_by_state),
    _service(_G, "ranks_missing", "", "engine instance", "Ranks that the engine says it has and that do not report.", service_readings.ranks_missing),
    _service(_C, "hub_messages_total", "", "kind", "Messages received from engines.", service_readings.hub_messages),
    _service(_C, "hub_messages_refused_total", "", "", "Messages refused because their engine process has been superseded.", service_readings.hub_refused),
    _service(_C, "hub_messages_invalid_total", "", "cause", "Messages refused because their values cannot be: a counter that fell, a rank that is none.", service_readings.hub_invalid),
    _service(_C, "hub_frames_undecodable_total", "", "", "Frames in another format or of another version.", service_readings.hub_undecodable),
    _service(_C, "hub_handshakes_refused_total", "", "cause", "Refused connections to the service's endpoint.", service_readings.hub_handshakes),
    _service(_C, "hub_ranks_expired_total", "", "", "Ranks forgotten, long after they left or fell silent.", service_readings.hub_expired),
    _service(_C, "hub_violations_evicted_total", "", "", "Violation rows discarded for newer ones.", service_readings.hub_evicted),
    _service(_C, "service_faults_total", "", "part", "Exceptions caught in the service, by part.", service_readings.service_faults),
    _service(_C, "log_events_dropped_total", "", "", "Log lines (violations, audited requests) that could not be written.", service_readings.log_dropped),
    _service(_C, "incidents_total", "", "", "Incidents (bursts of violations of one engine instance) opened.", service_readings.incidents_opened),
    _service(_G, "incident_info", "", "engine instance rank incident_id trace_id reason phase group slot position request", "The rank's latest incident that nobody has acknowledged, with its first violation on that rank; always 1.", service_readings.incident_info),
    _service(_C, "drills_total", "", "engine instance rank outcome", "Drills (one fault injected into an unused slot), by outcome.", service_readings.drills),
    _service(_G, "drill_last_detected_timestamp_seconds", "seconds", "engine instance rank", "End of the rank's latest detected drill.", service_readings.drill_detected),
    _service(_C, "changed_bits_total", "", "engine instance rank bit direction", "Flipped bits in the evidence of damaged slots; 0 is a word's least significant bit.", service_readings.changed_bits),
    _service(_C, "transferred_findings_total", "", "engine instance rank peer", "Slots whose bytes were damaged when they arrived from a peer: `unknown` = nobody names it, `host` = memory of this host, `other` = beyond the first 32.", service_readings.transferred),
    _service(_G, "device_info", "", "gpu_uuid node pci_bus_id gpu_model driver_version", "GPUs of the service's node, as NVML or amdsmi names them; always 1.", device_readings.info),
    _service(_G, "device_sampled_timestamp_seconds", "seconds", "gpu_uuid", "When the GPU's health was read; a driver that hangs ends its series after a minute.", device_readings.sampled),
    _service(_C, "device_ecc_errors_total", "", "gpu_uuid counter error", "Memory errors: volatile since the driver was loaded, aggregate over the GPU's life.", device_readings.ecc_errors),
    _service(_C, "device_block_errors_total", "", "gpu_uuid block error", "AMD: errors since the driver was loaded by the GPU's block; umc is its memory, xgmi_wafl its links.", device_readings.block_errors),
    _service(_G, "device_sram_threshold_exceeded", "", "gpu_uuid", "1 once SRAM errors are more than the GPU tolerates; it should be replaced.", device_readings.sram_threshold),
    _service(_C, "device_remapped_rows_total", "", "gpu_uuid error", "Rows of memory that were replaced by spare ones, by the error that led to it; on AMD retired pages.", device_readings.remapped_rows),
    _service(_G, "device_remap_pending", "", "gpu_uuid", "1 while a row, on AMD a page, is replaced only at the next reset of the GPU.", device_readings.remap_pending),
    _service(_G, "device_remap_failed", "", "gpu_uuid", "1 once a row could not be replaced, as no spare ones are left in its bank; on AMD a page not retired.", device_readings.remap_failed),
    _service(_G, "device_recovery_action", "", "gpu_uuid action", "1 for what the driver asks for, 0 for the others.", device_readings.recovery_action),
    _service(_G, "device_throttled", "", "gpu_uuid reason", "1 while clocks are held down for this reason.", device_readings.throttled),
    _service(_C, "device_xid_events_total", "", "gpu_uuid xid", "Xid errors since the service listens; rare numbers are counted as `other`.", device_readings.xids),
    _service(_C, "telemetry_exported_total", "", "signal", "Spans, log records and metric points that the OTLP receiver accepted.", service_readings.exported),
    _service(_C, "telemetry_dropped_total", "", "signal cause", "Spans, log records and metric points lost on the way to the OTLP receiver.", service_readings.export_dropped),
    _service(_G, "scrape_duration_seconds", "seconds", "", "Duration of the previous collection.", service_readings.scrape_duration),
    _service(_C, "scrape_errors_total", "", "", "Families that could not be collected.", service_readings.scrape_errors),
)
# fmt: on


def all_metrics() -> tuple[Metric, ...]:
    """All families, in order of exposition."""
    return (*RANK_METRICS, *SERVICE_METRICS)

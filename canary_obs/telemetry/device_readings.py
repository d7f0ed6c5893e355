"""How the metrics of a node's GPUs are read; all begin with the label `gpu_uuid`."""

from __future__ import annotations

from collections.abc import Iterator

from canary_obs.devices.health import OTHER_ACTION, RECOVERY_ACTIONS
from canary_obs.devices.identity import node_name
from canary_obs.telemetry.readings import Reading
from canary_obs.telemetry.service_readings import ServiceView


def info(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        gpu = health.identity
        yield (gpu.gpu_uuid, node_name(), gpu.pci_bus_id, gpu.gpu_model, gpu.driver_version), 1.0


def sampled(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        yield (health.identity.gpu_uuid,), health.time


def ecc_errors(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        for (counter, error), count in health.ecc_errors.items():
            yield (health.identity.gpu_uuid, counter, error), float(count)


def block_errors(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        for (block, error), count in health.block_errors.items():
            yield (health.identity.gpu_uuid, block, error), float(count)


def sram_threshold(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        yield from _flag(health.identity.gpu_uuid, health.sram_threshold_exceeded)


def remapped_rows(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        for error, count in health.remapped_rows.items():
            yield (health.identity.gpu_uuid, error), float(count)


def remap_pending(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        yield from _flag(health.identity.gpu_uuid, health.remap_pending)


def remap_failed(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        yield from _flag(health.identity.gpu_uuid, health.remap_failed)


def recovery_action(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        if health.recovery_action is not None:
            for action in (*RECOVERY_ACTIONS, OTHER_ACTION):
                yield (health.identity.gpu_uuid, action), float(health.recovery_action == action)


def throttled(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        for reason, active in health.throttles.items():
            yield (health.identity.gpu_uuid, reason), float(active)


def xids(service: ServiceView) -> Iterator[Reading]:
    for health in service.devices:
        for xid, count in (health.xids or {}).items():
            yield (health.identity.gpu_uuid, xid), float(count)


def _flag(uuid: str, value: bool | None) -> Iterator[Reading]:
    if value is not None:
        yield (uuid,), float(value)

"""Reads what the recording rules have of a fleet from a Prometheus, or what answers as one."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canary_obs.errors import ConfigurationError
from canary_obs.fleet.evidence import Exposure, FleetEvidence, Others, Release

TIMEOUT_SECONDS = 30.0
_FOUND = "gpu:kv_canary_observed:periods7d"

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlace:
    """Where a GPU is, as its newest rank or its node's service says; "" = unknown."""

    node: str = ""
    pci_bus_id: str = ""
    gpu_model: str = ""
    driver_version: str = ""


class PrometheusSource:
    """Instant queries over HTTP. Raises ConfigurationError for a Prometheus that does not answer."""

    def __init__(self, url: str, token: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            rule = "it is not an http:// or https:// URL"
            raise ConfigurationError("--prometheus", url, rule, "Use http://HOST:9090 or its like.")
        self._url, self._token = url.rstrip("/"), token

    def evidence(self) -> FleetEvidence:
        """What is known of the week, as the rules last recorded it."""
        found = self.query("gpu:kv_canary_finding_periods:count7d")
        periods = {_key(labels): value for labels, value in found}
        own_bytes = {
            _key(labels): value
            for labels, value in self.query(f"gpu:kv_canary_bytes_verified:sum7d and on (gpu_uuid) {_FOUND}")
        }
        return FleetEvidence(
            exposures=tuple(
                Exposure(
                    gpu_uuid=uuid, release=release, verified_bytes=own_bytes.get((uuid, release), 0.0),
                    periods=int(periods.get((uuid, release), 0)),
                )
                for uuid, release in sorted(periods.keys() | own_bytes.keys())
            ),
            others=self._others(own_bytes),
            xids=self._uuids("gpu:kv_canary_device_xids:group"),
            remaps=self._uuids("gpu:kv_canary_device_remaps:group"),
            transferred={
                (labels["gpu_uuid"], labels.get("peer", "unknown")): int(value)
                for labels, value in self.query("gpu:kv_canary_transferred_periods:count7d")
            },
        )  # fmt: skip

    def places(self) -> dict[str, GpuPlace]:
        """Of the GPUs with findings."""
        found: dict[str, GpuPlace] = {}
        for series in ("kv_canary_device_info", "kv_canary_rank_info"):
            for labels, _ in self.query(f'{series}{{gpu_uuid!=""}} and on (gpu_uuid) {_FOUND}'):
                known = {name: labels.get(name, "") for name in GpuPlace.__dataclass_fields__}
                found[labels["gpu_uuid"]] = GpuPlace(**known)
        return found

    def query(self, expression: str) -> list[Sample]:
        """An instant vector: labels and value of each series."""
        address = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            request = urllib.request.Request(address, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                content: Any = json.load(answer)
            result = content["data"]["result"]
            return [(series["metric"], float(series["value"][1])) for series in result]
        except urllib.error.HTTPError as error:
            raise self._refusal(
                f"answered {error.code}: {error.read(200).decode(errors='replace')}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refusal(f"cannot be asked: {error}") from None

    def _others(self, own_bytes: Mapping[tuple[str, Release], float]) -> dict[Release, Others]:
        """The releases without the GPUs that have findings."""
        gpus = {
            _release(labels): int(value) for labels, value in self.query("release:kv_canary_gpus:count7d")
        }
        others = {}
        for labels, total in self.query("release:kv_canary_bytes_verified:sum7d"):
            release = _release(labels)
            known = [value for (_, own), value in own_bytes.items() if own == release]
            others[release] = Others(max(0.0, total - sum(known)), gpus.get(release, 0) - len(known))
        return others

    def _uuids(self, name: str) -> frozenset[str]:
        return frozenset(labels["gpu_uuid"] for labels, _ in self.query(f"{name} and on (gpu_uuid) {_FOUND}"))

    def _refusal(self, rule: str) -> ConfigurationError:
        remedy = "Name a Prometheus that has canary_obs's recording rules (alerts/rules/fleet.yml)."
        return ConfigurationError("--prometheus", self._url, rule, remedy)


def _release(labels: Mapping[str, str]) -> Release:
    return Release(labels.get("engine", ""), labels.get("engine_version", ""), labels.get("model", ""))


def _key(labels: Mapping[str, str]) -> tuple[str, Release]:
    return labels["gpu_uuid"], _release(labels)

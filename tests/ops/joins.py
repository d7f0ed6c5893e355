"""Joins of our labels with those of dcgm-exporter, by a real Prometheus and by their text."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from canary_obs.engines.toolkit.service_process import free_port


@dataclass(frozen=True, slots=True)
class Ask:
    """A running Prometheus; called with an expression it returns the labels of each series, with `value`."""

    url: str

    def __call__(self, expression: str) -> list[dict[str, str]]:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return [{**row["metric"], "value": row["value"][1]} for row in rows]


# Whatever its release, an exporter's series have the identity that the rank has, address and model and all.
JOINED = (
    "kv_canary_rank_info * on (gpu_uuid, pci_bus_id, gpu_model) group_left () "
    "max by (gpu_uuid, pci_bus_id, gpu_model) (label_replace(label_replace("
    '{__name__=~"DCGM_FI_DEV_ROW_REMAP_(FAILURE|FAILED)"} * 0 + 1,'
    ' "gpu_uuid", "$1", "UUID", "(.*)"), "gpu_model", "$1", "modelName", "(.*)"))'
)


def joined_by_text(own: str, theirs: str) -> set[str]:
    """UUIDs of the ranks whose identity is among those of an exporter's page."""

    def identities(text: str, names: Sequence[str], labels: Sequence[str]) -> set[tuple[str, ...]]:
        return {
            tuple(sample.labels.get(label, "") for label in labels)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in names
        }

    ours = identities(own, ("kv_canary_rank_info",), ("gpu_uuid", "pci_bus_id", "gpu_model"))
    failed = ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED")
    return {gpu[0] for gpu in ours & identities(theirs, failed, ("UUID", "pci_bus_id", "modelName"))}


@contextmanager
def prometheus_of(
    binary: str, folder: Path, ports: Sequence[int], *, rules: str = "", seconds: float = 60.0
) -> Iterator[Ask]:
    """A Prometheus that scrapes these ports each second; it is there once every target was scraped."""
    port, targets = free_port(), [f"127.0.0.1:{number}" for number in ports]
    (folder / "rules.yml").write_text(rules or "groups: []\n")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\n"
        f"scrape_configs: [{{job_name: all, honor_labels: true, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    ask = Ask(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + seconds
        while not _scraped(ask, len(ports)):
            assert process.poll() is None, (folder / "prometheus.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "prometheus.log").read_text()[-3000:]
            Event().wait(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def _scraped(ask: Ask, targets: int) -> bool:
    try:
        return len(ask("up == 1")) == targets
    except OSError:
        return False

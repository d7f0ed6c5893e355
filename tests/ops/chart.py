"""The Helm chart as Helm renders it, and the objects that come out."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from dashboards.manifests import CHART, HelmMissing, render

# Every switch the other way, and every list with something in it.
EVERYTHING: dict[str, Any] = {
    "replicas": 2,
    "engine": {
        "args": ["--tensor-parallel-size", "4"],
        "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
        "gpus": 4,
        "huggingFaceSecret": "hugging-face",
        "cache": {"claim": "weights"},
        "allowFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
    },
    "canary": {
        "drill": True,
        "image": {"repository": "registry.example/canary", "tag": "1"},
        "engineEnv": [{"name": "KV_CANARY_SWEEP_BUDGET_MS", "value": "2"}],
        "serviceEnv": [{"name": "KV_CANARY_ORDERS_PER_MINUTE", "value": "10"}],
    },
    "prometheus": {"labels": {"release": "prometheus"}},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podLabels": {"team": "inference"},
    "podAnnotations": {"note": "1"},
}
NOTHING: dict[str, Any] = {
    "engine": {"gpus": 0, "resources": {"requests": None, "limits": None}},
    "canary": {"install": False},
    "prometheus": {"podMonitor": False, "rules": False},
    "dashboards": {"create": False},
    "networkPolicy": False,
}


def skip_without_helm(why: str) -> NoReturn:
    """Helm has wheels for x86-64 alone; there, CI must have it."""
    assert not (os.environ.get("CANARY_CI") and platform.machine() == "x86_64"), why
    pytest.skip(why)


def loaded_helm() -> Any:
    """The module of Helm's own engine. Skips the test where it cannot be had."""
    try:
        return importlib.import_module("helm_python")
    except ImportError as missing:
        skip_without_helm(str(missing))


def objects(values: dict[str, Any] | None = None, chart: Path = CHART, *, name: str = "llm-engine") -> list:
    """The chart's objects, of all templates. Skips the test where no Helm can be had."""
    try:
        texts = render(chart, values, name=name)
    except HelmMissing as missing:
        skip_without_helm(str(missing))
    found = [each for text in texts.values() for each in yaml.safe_load_all(text)]
    return [each for each in found if each is not None]


def of_kind(found: list, kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (wanted,) = [each for each in found if each["kind"] == kind]
    return wanted

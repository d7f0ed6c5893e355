"""Settings, HTTP API, metrics and wire format stay as users and peers know them.

After an intended change: `UPDATE_GOLDEN=1 pytest tests/contracts/test_public_interfaces.py`,
and an entry in CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canary_obs import records
from canary_obs.config import CanaryConfig, ServiceConfig
from canary_obs.hub.hub import Hub
from canary_obs.service.app import create_app
from canary_obs.service.token_store import TokenStore
from canary_obs.telemetry.catalog import all_metrics
from canary_obs.transport.wire import PROTOCOL_VERSION

GOLDEN = Path(__file__).parents[1] / "golden"


def settings() -> Any:
    """Every setting with its type; defaults that differ by host are left out."""
    return {
        kind.__name__: {
            field.name: {
                "type": str(field.type),
                "default": "by host" if field.default is msgspec.NODEFAULT else str(field.default),
            }
            for field in msgspec.structs.fields(kind)
        }
        for kind in (CanaryConfig, ServiceConfig)
    }


def openapi() -> Any:
    guarded = ServiceConfig(token="a-token-of-sixteen-characters")
    documents = {
        "open": create_app(Hub()).openapi(),
        "with tokens": create_app(Hub(), guarded, token_store=TokenStore(guarded)).openapi(),
    }
    for document in documents.values():
        document["info"].pop("version")
    return documents


def wire() -> Any:
    return {
        "version": PROTOCOL_VERSION,
        "messages": msgspec.json.schema(records.EngineMessage),
        "commands": msgspec.json.schema(records.Command),
    }


def metrics() -> Any:
    return [
        {"name": metric.name, "kind": metric.type.value, "labels": list(metric.labels)}
        for metric in all_metrics()
    ]


def without_prose(schema: Any) -> Any:
    """Titles and field names are the interface; sentences about them may be improved."""
    if isinstance(schema, dict):
        return {
            key: without_prose(value)
            for key, value in schema.items()
            if not (key in ("description", "summary") and isinstance(value, str))
        }
    return [without_prose(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("interface", [settings, openapi, wire, metrics], ids=lambda build: build.__name__)
def test_an_interface_is_the_golden_one(interface: Any) -> None:
    path = GOLDEN / f"{interface.__name__}.json"
    text = json.dumps(without_prose(interface()), indent=1, sort_keys=True) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()

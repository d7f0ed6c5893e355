"""Copies to the host that arrive as on a GPU: not yet when they are asked for the first time."""

from __future__ import annotations

import pytest

from canary_obs.runtime.device.delayed_device_host import CompletedEvent


def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, of all pipelines on the CPU."""
    asked: dict[int, int] = {}

    def query(event: object) -> bool:
        asked[id(event)] = asked.get(id(event), 0) + 1
        return asked[id(event)] > 1

    monkeypatch.setattr(CompletedEvent, "query", query)
    monkeypatch.setattr(CompletedEvent, "record", lambda event: asked.pop(id(event), None))

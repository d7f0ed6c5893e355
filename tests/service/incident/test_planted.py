"""Faults planted in a real engine: each incident's sentence says what was done, and its class is proposed."""

from __future__ import annotations

import re

import pytest

from canary_obs.hub.hub import Hub
from canary_obs.service.incident.report import build_report
from tests.service.incident.planted import KINDS, case_of, plant


@pytest.mark.parametrize("kind", KINDS)
def test_the_sentence_says_what_was_planted(kind):
    hub = Hub()
    report = build_report(hub, plant(kind, hub))
    match = re.match(KINDS[kind], report.sentence)
    assert match is not None, report.sentence
    if kind == "row_mix_up":
        assert match[1] != match[2]
    if case_of(kind).title:
        assert case_of(kind).title in [cause.title for cause in report.causes], report.causes
    assert report.injected is None
    assert {moment.what for moment in report.timeline} == {
        "written", "last good check", "damage", "detection", "page", "acknowledged",
    }  # fmt: skip

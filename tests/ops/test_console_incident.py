"""Incidents' pages in a real Chromium, over faults that were planted in a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from canary_obs.config import RUNBOOK_BASE
from canary_obs.telemetry.incident_bundle import read_bundle
from tests.ops.console_fleet import READER, ConsoleFleet, sign_in
from tests.service.fakes import identity, snapshot
from tests.service.incident.planted import KINDS, case_of, plant

pytestmark = [pytest.mark.ops, pytest.mark.timeout(180)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_what_was_planted(page: Any, console: ConsoleFleet, kind: str) -> None:
    incident = plant(kind, console.hub)
    sign_in(page, console.url, path=f"/incidents/{incident}")
    page.get_by_role("heading", name=re.compile(KINDS[kind])).wait_for()
    if title := case_of(kind).title:
        page.locator("#causes").get_by_text(title, exact=True).wait_for()
    assert page.locator("#planted").is_hidden()  # nothing was injected by the canary itself
    assert page.locator("#timeline li").count() == 6
    changed = page.locator("#damage td.hit").count()
    assert changed == (1 if kind == "bit_flip" else 0)


def test_an_acknowledgement_with_a_comment_is_taken_back(page: Any, console: ConsoleFleet) -> None:
    incident = console.find(console.ranks[5], slot=12)
    sign_in(page, console.url, path=f"/incidents/{incident}")
    assert page.get_by_role("button", name="Undo").is_hidden()
    page.get_by_role("button", name="Acknowledge", exact=True).click()
    page.get_by_label("Comment").fill("DIMM replaced")
    page.get_by_role("dialog").get_by_role("button", name="Acknowledge").click()
    page.get_by_text("by oncall: DIMM replaced").wait_for()
    page.get_by_role("button", name="Undo").click()
    page.locator("#timeline").get_by_text("not yet").wait_for()
    (made,) = console.hub.acknowledgements.newest_first()
    assert (made.undone_ns is not None, list(made.incidents)) == (True, [incident])
    assert page.get_by_role("button", name="Undo").is_hidden()


def test_the_bundle_is_a_file_that_is_read_without_the_service(
    page: Any, console: ConsoleFleet, tmp_path: Path
) -> None:
    incident = console.find(console.ranks[14], slot=77)
    sign_in(page, console.url, READER, f"/incidents/{incident}")
    runbook = page.get_by_role("link", name="Runbook").get_attribute("href")
    assert runbook == f"{RUNBOOK_BASE}/KVCanaryDamage.md"
    with page.expect_download() as download:
        page.get_by_role("link", name="Download bundle").click()
    assert download.value.suggested_filename == f"incident-{incident}.json"
    download.value.save_as(tmp_path / "bundle.json")
    assert read_bundle(tmp_path / "bundle.json").incident.first[0].violation.slot == 77
    assert json.loads((tmp_path / "bundle.json").read_text("utf-8"))["incident"]["id"] == incident


def test_a_fault_that_was_injected_on_purpose_has_a_banner(page: Any, console: ConsoleFleet) -> None:
    who = identity(0, instance="perturbed")
    console.join(who)
    console.send(who, snapshot(who, 2))  # its perturbations are counted
    incident = console.find(who, slot=5)
    sign_in(page, console.url, READER, f"/incidents/{incident}")
    page.get_by_role("note").get_by_text("Faults are injected on purpose here (rank 0").wait_for()
    assert page.locator("main button:visible", has_text="cknowledge").count() == 0

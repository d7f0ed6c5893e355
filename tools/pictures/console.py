"""Pictures of the console: `python -m tools.pictures.console`.

The overview shows a live service with 64 simulated ranks, the incident a fault that was planted in a real
engine; token ids and prompts never reach either.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from canary_obs.records import Identity, Snapshot, Violations
from canary_obs.vocabulary import Phase, Reason, State, SweepStatus
from tests.ops.browser import PHONE, chromium
from tests.ops.console_fleet import ConsoleFleet, sign_in
from tests.service.fakes import FULL, counters, hello, snapshot, violation
from tests.service.incident.planted import plant
from tools.pictures.shot import take

DESK = {"width": 1280, "height": 900}
SWA = msgspec.structs.replace(FULL, name="swa", slot_bytes=64, protected_slot_bytes=56)
TROUBLE = {
    3: (State.DEGRADED, "the last sweep is 2.3 h old; the limit is 1 h"),
    17: (State.VIOLATED, "1 violations"),
    40: (State.BLIND, "no counter has reached the host for 12 s"),
    50: (State.DEGRADED, "sweeps and patrol are paused"),
}  # fmt: skip


def at_step(console: ConsoleFleet, number: int, step: int) -> Snapshot:
    """The snapshot of a rank; those in TROUBLE say why."""
    state, reason = TROUBLE.get(number, (State.OK, ""))
    now, found = time.time_ns(), int(state is State.VIOLATED)
    return snapshot(
        console.ranks[number], step, state=state, state_reasons=(reason,) if reason else (), perturbations={},
        groups={"full": counters(step, found), "swa": counters(step)},
        forwards={"full": step, "swa": step}, forwards_checked={"full": step, "swa": step - number % 3},
        last_sweep_ns=now - (60 + 37 * number + (number == 3) * 8300) * 10**9, time_ns=now,
        overhead_seconds={"head": 0.002 * step, "tail": (0.004 + number / 40_000) * step},
        paused=number == 50,
    )  # fmt: skip


def populate(console: ConsoleFleet) -> None:
    """Two groups on every rank, trouble on some, and two incidents."""
    for number, who in enumerate(console.ranks):
        console.send(who, msgspec.structs.replace(hello(who), groups=(FULL, SWA)))
        console.send(who, at_step(console, number, 3000 + number))
    find(console, console.ranks[40], slot=733, position=61, request="r000031")
    find(
        console, console.ranks[17], slot=1026, reason=Reason.POSITION, phase=Phase.TAIL, part=None,
        position=158, request="r000002", expected="0x9e", actual="0x79",
    )  # fmt: skip


def find(console: ConsoleFleet, who: Identity, **changes: Any) -> None:
    row = violation(**{"time_ns": time.time_ns(), **changes})
    console.send(who, Violations(identity=who, rows=(row,)))


def sweep(page: Any, console: ConsoleFleet) -> None:
    """A sweep of every rank, some way through; the rates are of two looks."""
    page.get_by_role("button", name="Sweep", exact=True).click()
    page.get_by_text("0 of 64 ranks done").wait_for()
    page.get_by_text("Sweep started").wait_for(state="detached")
    for share in (20, 47):
        for number, who in enumerate(console.ranks):
            console.report(who, SweepStatus.RUNNING, share - number % 5)
            console.send(who, at_step(console, number, 3000 + share * 10 + number))
        page.wait_for_timeout(2100)  # the page fetches its data every other second
    page.get_by_text("ETA").wait_for()


def main() -> None:
    """Take every picture of the console."""
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        console = ConsoleFleet(Path(folder))
        try:
            populate(console)
            page = browser.new_context(viewport=DESK, color_scheme="light").new_page()
            sign_in(page, console.url)
            sweep(page, console)
            for scheme, name in (("light", "console_overview"), ("dark", "console_overview_dark")):
                page.emulate_media(color_scheme=scheme)
                take(page, name)
            page.emulate_media(color_scheme="light")
            page.get_by_label("Search ranks").fill("gpu-2")
            page.set_viewport_size(PHONE)
            take(page, "console_overview_phone")
            page.locator("#ranks tr").first.scroll_into_view_if_needed()
            take(page, "console_ranks_phone")
            incident = plant("bit_flip", console.hub)
            page.set_viewport_size(DESK)
            page.goto(f"{console.url}/incidents/{incident}")
            page.locator("#causes li").first.wait_for()
            for scheme, name in (("light", "console_incident"), ("dark", "console_incident_dark")):
                page.emulate_media(color_scheme=scheme)
                take(page, name)
            page.set_viewport_size(PHONE)
            take(page, "console_incident_phone")
        finally:
            console.service.close()


if __name__ == "__main__":
    main()

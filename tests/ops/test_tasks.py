"""Ten tasks of people who operate a fleet, by command and in a real Chromium, as docs/tasks.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from canary_obs.hub.acknowledgements import AcknowledgeRequest
from canary_obs.hub.commands import StartSweepRequest
from canary_obs.vocabulary import Phase, Reason, State, SweepStatus
from tests.ops.console_fleet import WRITER, ConsoleFleet, sign_in

pytestmark = [pytest.mark.ops, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[2] / "docs/tasks.md"
ROW = re.compile(
    r"^\| (?P<number>\d+) \| (?P<task>[^|]+) \| (?P<command>[^|]+) \|[^|]*\| (?P<console>[^|]+) \|",
    re.MULTILINE,
)
STEP = re.compile(r"(run|open|press|type|save|see) `([^`]+)`(?: into `([^`]+)`)?")
ROWS = {int(row["number"]): row.groupdict() for row in ROW.finditer(PAGE.read_text("utf-8"))}
WORST, SWEPT, BLIND = 17, 29, 40  # fake/gpu-2/1, fake/gpu-3/5, fake/gpu-5/0
REQUEST = "r000002"


@dataclass(slots=True)
class Scene:
    """What a task finds: names in capitals stand for these in its steps."""

    console: ConsoleFleet
    folder: Path
    names: dict[str, str]

    def steps(self, text: str) -> list[tuple[str, str, str]]:
        for name, value in self.names.items():
            text = text.replace(name, value)
        found = STEP.findall(text)
        assert STEP.sub("", text).strip(" ,|") == "", text
        return found


@pytest.fixture
def scene(console: ConsoleFleet, tmp_path: Path) -> Scene:
    """One damaged rank, one blind one, two incidents; a sweep of all ranks for the task that cancels it."""
    console.finishes = True
    worst, blind = console.ranks[WORST], console.ranks[BLIND]
    console.hub.acknowledge(AcknowledgeRequest())  # what earlier tasks have left
    console.hub.incidents.tick(float("inf"))
    console.find(blind, slot=733)
    incident = console.find(
        worst, slot=1026, reason=Reason.POSITION, phase=Phase.TAIL, part=None, position=158,
        request=REQUEST, expected="0x9e", actual="0x79",
    )  # fmt: skip
    reason = "no counter has reached the host for 12 s"
    console.advance(blind, state=State.BLIND, state_reasons=(reason,))
    return Scene(console, tmp_path, {"INCIDENT": incident, "TOKEN": WRITER})


def report(way: str, number: int, steps: list[tuple[str, str, str]], began: float) -> None:
    actions = sum(verb != "see" for verb, _, _ in steps)
    print(f"\n{way} task {number}: {actions} steps, {time.monotonic() - began:.1f} s")


def begin(scene: Scene, number: int) -> None:
    if number == 4:
        scene.console.finishes = False
        scene.names["SWEEP"] = scene.console.hub.start_sweep(StartSweepRequest()).id
        for who in scene.console.ranks:
            scene.console.report(who, SweepStatus.RUNNING, 30)


@pytest.mark.parametrize("number", ROWS)
def test_by_command(scene: Scene, number: int) -> None:
    begin(scene, number)
    (scene.folder / "token").write_text(WRITER)
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200",
        "KV_CANARY_URL": scene.console.url, "KV_CANARY_TOKEN_FILE": str(scene.folder / "token"),
    }  # fmt: skip
    steps, output, began = scene.steps(ROWS[number]["command"]), "", time.monotonic()
    for verb, text, _ in steps:
        if verb == "see":
            assert text in output
            continue
        assert verb == "run"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=scene.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (0, 3), done.stderr  # 3: the state is violated, and said to be
        output = done.stdout + done.stderr
    report("by command", number, steps, began)


@pytest.mark.parametrize("number", ROWS)
def test_in_the_console(page: Any, scene: Scene, number: int) -> None:
    begin(scene, number)
    if number > 1:  # the first one signs in
        sign_in(page, scene.console.url)
        page.locator("#ranks tr").nth(63).wait_for()
    steps, began = scene.steps(ROWS[number]["console"]), time.monotonic()
    verbs: dict[str, Callable[[Any, Scene, str, str], Any]] = {
        "open": go, "press": press, "type": write, "save": save, "see": see,
    }  # fmt: skip
    for verb, text, place in steps:
        page = verbs[verb](page, scene, text, place) or page
    report("in the console", number, steps, began)


def go(page: Any, scene: Scene, text: str, _: str) -> Any:
    if text.startswith("/"):
        page.goto(scene.console.url + text)
        return page
    offline = page.context.browser.new_context(offline=True).new_page()  # neither cookies nor the service
    offline.goto((scene.folder / text).as_uri())
    return offline


def press(page: Any, scene: Scene, text: str, _: str) -> None:
    place = page.get_by_role("dialog") if page.locator("dialog[open]").count() else page
    found = place.get_by_role("button", name=text, exact=True).or_(place.get_by_role("link", name=text))
    if not text.startswith("Download"):
        found.first.click()
        return
    with page.expect_download() as download:
        found.first.click()
    download.value.save_as(scene.folder / download.value.suggested_filename)
    assert REQUEST in (scene.folder / download.value.suggested_filename).read_text("utf-8")


def write(page: Any, _: Scene, text: str, place: str) -> None:
    page.get_by_label(place).fill(text)


def save(page: Any, scene: Scene, text: str, _: str) -> None:
    session = page.context.new_cdp_session(page)
    (scene.folder / text).write_text(
        session.send("Page.captureSnapshot", {"format": "mhtml"})["data"], newline=""
    )


def see(page: Any, _: Scene, text: str, __: str) -> None:
    page.get_by_text(text).first.wait_for()


def test_there_are_ten_tasks_and_each_asks_something() -> None:
    assert list(ROWS) == list(range(1, 11))
    for row in ROWS.values():
        assert "see `" in row["command"]
        assert "see `" in row["console"]

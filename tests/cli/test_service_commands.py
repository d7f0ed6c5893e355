"""Every command that asks a service, against a live one with 64 ranks: output, effect and exit code."""

from __future__ import annotations

import json

import msgspec
import pytest

from canary_obs.cli import run
from canary_obs.cli.status import event_text
from canary_obs.records import Acknowledge, Heals, Pause, PauseSweep, Resume, StartSweep
from canary_obs.vocabulary import Completeness, HealAction, HealOutcome, State, SweepStatus
from tests.cli.conftest import DRILLS, RANKS, TOKEN
from tests.service.fakes import snapshot, tainted
from tests.service.test_heal import LIMITED
from tests.service.test_heal_account import ENDS, heal


def received(fleet, kind):
    return [number for number, rank in enumerate(fleet.ranks) if kind in map(type, rank.received)]


def test_status_names_the_verdict_and_every_rank(cli, fleet):
    code, out, _ = cli("status")
    assert code == 0
    assert out.startswith("ok  64 ok")
    assert all(f"fake/test/{number} " in out for number in range(RANKS))


def test_status_lists_the_worst_first_and_ends_with_3(cli, fleet):
    fleet.damage(17)
    code, out, _ = cli("status")
    assert code == 3
    lines = [line for line in out.splitlines() if "fake/test/" in line]
    assert out.startswith("violated  1 violated, 63 ok")
    assert "1 violation" in lines[0]
    assert "fake/test/17" in lines[1]


def test_status_of_a_blind_and_of_a_degraded_service(cli, fleet):
    fleet.hub.fault("audit_log", OSError("full"), State.DEGRADED)
    assert cli("status")[0] == 5
    fleet.hub.fault("listener", RuntimeError("gone"))
    assert cli("status")[0] == 4


def test_json_is_the_service_s_own(asked):
    assert len(asked("status")["ranks"]) == RANKS


def test_a_sweep_is_started_and_waited_for(cli, fleet):
    code, out, err = cli("sweep --wait")
    assert code == 0
    assert "64 ranks; Ctrl-C leaves it running" in err
    assert "passed" in out
    assert received(fleet, StartSweep) == list(range(RANKS))


def test_the_exit_code_of_a_sweep_is_its_result(cli, fleet):
    for status, code in (("violated", 3), ("failed", 4), ("cancelled", 4), ("passed", 0)):
        fleet.ranks[0].ends_as = SweepStatus(status)
        assert cli("sweep --wait --ranks 0")[0] == code


def test_a_sweep_takes_its_scope_to_the_ranks(cli, asked, fleet):
    record = asked(
        "sweep --ranks 3-4,9 --engine fake --groups full --links-only --used --slots 8-15 --budget-ms 2 "
        "--deadline 60 --request r1"
    )
    assert received(fleet, StartSweep) == [3, 4, 9]
    command = fleet.ranks[9].received[-1]
    assert command == StartSweep(
        id=record["id"], groups=("full",), data=False, used_only=True, first_slot=8, last_slot=15,
        budget_ms=2.0, request="r1",
    )  # fmt: skip
    assert record["request"]["deadline_seconds"] == 60


def test_sweeps_are_listed_shown_held_and_cancelled(cli, asked, fleet):
    for rank in fleet.ranks:
        rank.finishes = False
    sweep = asked("sweep")["id"]
    assert [record["id"] for record in asked("sweeps")["sweeps"]] == [sweep]
    assert sweep in cli("sweeps")[1]
    assert cli(f"sweeps show {sweep}")[1].count("fake/test/") == RANKS
    assert "paused" in cli(f"sweeps pause {sweep}")[1]
    assert received(fleet, PauseSweep) == list(range(RANKS))
    assert asked(f"sweeps resume {sweep}")["paused"] is False
    assert asked(f"sweeps cancel {sweep}")["status"] == "cancelled"
    code, out, err = cli("sweeps show nothing")
    assert (code, out) == (1, "")
    assert err == "error: no sweep 'nothing' is kept; GET /canary/sweeps lists them (404)\n"


def test_violations_are_listed_page_by_page(cli, asked, fleet):
    for slot in range(3):
        fleet.damage(5, slot)
    code, out, err = cli("violations --limit 2 --rank 5 --reason kv_data")
    assert code == 0
    assert out.count("kv_data") == 2
    assert err == "3 match; the next page: --before 2\n"
    assert [event["number"] for event in asked("violations --before 2")["violations"]] == [1]
    assert cli("violations --reason nonsense")[0] == 1


def test_an_incident_is_shown_by_id_and_from_a_file(cli, asked, fleet, tmp_path):
    incident = fleet.damage(5)
    assert incident in cli("incidents")[1]
    shown = cli(f"incident show {incident}")[1]
    assert f"Incident {incident}: 1 violation (kv_data 1)" in shown
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(asked(f"incident show {incident}")))
    assert cli(f"incident show {saved}")[1] == shown
    assert cli("incident show none")[0] == 1
    assert cli("incident show none.json")[0] == 2


@pytest.mark.parametrize("line", ["incidents", "violations", "tainted"])
def test_an_incidents_id_is_whole_on_a_narrow_terminal(line, cli, fleet, monkeypatch):
    """It is an argument of other commands."""
    incident = fleet.damage(5)
    fleet.ranks[5].send(tainted(fleet.ranks[5].identity, 1, "chat-7", incident=incident))
    monkeypatch.setenv("COLUMNS", "80")
    assert incident in cli(line)[1]


def test_a_sweeps_id_is_whole_on_a_narrow_terminal(cli, asked, monkeypatch):
    sweep = asked("sweep")["id"]
    monkeypatch.setenv("COLUMNS", "80")
    assert sweep in cli("sweeps")[1]


def test_who_read_damage_is_listed_and_in_the_incident(cli, asked, fleet):
    incident, rank = fleet.damage(5), fleet.ranks[5]
    rank.send(tainted(rank.identity, 1, "chat-7"))
    rank.send(tainted(rank.identity, 2, completeness=Completeness.UNKNOWN, cause="they are forgotten"))
    code, out, err = cli("tainted --limit 1")
    assert code == 0
    assert ("chat-7" in out, "they are forgotten" in out) == (True, False)
    assert err == "2 damages match; the next page: --since 1\n"
    out = cli("tainted --since 1")[1]
    assert ("chat-7" in out, "unknown: they are forgotten" in out) == (False, True)
    assert asked("tainted --rank 6")["tainted"] == []
    shown = cli(f"incident show {incident}")[1]
    assert "chat-7 (running): the slot itself, from step 5; 3 tokens from number 2 on" in shown
    assert "there may be more: they are forgotten" in shown


def test_one_of_two_incidents_is_acknowledged_and_taken_back(cli, asked, fleet):
    first = fleet.damage(5)
    fleet.hub.incidents.tick(float("inf"))
    second = fleet.damage(6)
    code, out, _ = cli(f"ack {first} --by ada -m known")
    assert (code, out) == (0, f"acknowledged: incident {first}, ranks 5\n")
    seen = {found["id"]: found["acknowledged"] for found in asked("incidents")["incidents"]}
    assert seen == {first: True, second: False}
    assert received(fleet, Acknowledge) == [5]
    assert "ada" in cli("incidents")[1]
    assert cli(f"ack {first} --undo")[1] == f"taken back: incident {first}, ranks 5\n"
    assert cli(f"ack {first} --undo")[::2] == (
        1, f"error: incident {first} has no acknowledgement to take back\n",
    )  # fmt: skip
    assert cli("ack --ranks 6")[1] == f"acknowledged: incident {second}, ranks 6\n"
    assert cli("ack --all")[1] == f"acknowledged: incident {first}, ranks 5\n"
    assert cli("ack --all")[2] == "no incident was open that this covers\n"


def test_pause_and_resume_by_rank(cli, fleet):
    code, out, _ = cli("pause --ranks 0-1")
    assert (code, out) == (0, "paused: 2 ranks (fake/test/0, fake/test/1)\n")
    assert received(fleet, Pause) == [0, 1]
    assert cli("resume --ranks 0")[1] == "resumed: 1 rank (fake/test/0)\n"
    assert received(fleet, Resume) == [0]
    assert cli("pause --ranks 64")[2].startswith("error: no rank matches rank 64; there are: ")


def test_a_drill_needs_its_scope_and_says_how_each_rank_did(cli, fleet, tmp_path):
    code, _, err = cli("drill")
    assert code == 1
    assert "lacks the scope 'inject'" in err
    (tmp_path / "token").write_text(DRILLS + "\n")
    code, out, _ = cli(f"drill --ranks 2,3 --token-file {tmp_path}/token")
    assert code == 0
    assert out.count("detected") == 2


def test_each_action_of_healing_is_shown(cli, fleet, monkeypatch):
    incident, rank = fleet.damage(5), fleet.ranks[5]
    done = {end: heal(*end, incident) for end in ENDS}
    rank.send(Heals(identity=rank.identity, rows=tuple(done.values())))
    shown = [line.split("│") for line in cli(f"incident show {incident}")[1].splitlines()]
    rows = {tuple(map(str.strip, line[2:4])) for line in shown if len(line) > 4 and "protect" in line[4]}
    # A release is an operator's, and of no incident.
    assert rows == {(action, outcome) for action, outcome in ENDS if action is not HealAction.RELEASE}
    counts = dict[HealAction, dict[HealOutcome, int]]()
    for number, (action, outcome) in enumerate(done):
        counts.setdefault(action, {})[outcome] = 3 + number
    rank.send(snapshot(rank.identity, 10, violations=1, healing=LIMITED, heals=counts))
    monkeypatch.setenv("COLUMNS", "1000")  # all of them in one line
    counted = cli("heal")[1]
    for number, ((action, outcome), one) in enumerate(done.items()):
        assert f"{action.value} {outcome.value} {3 + number}" in counted
        data = {"heal": msgspec.to_builtins(one), "incident": incident}
        assert f"healing: {action.value} {outcome.value}, group full, block 3" in event_text("heal", data)


def test_watch_prints_a_line_per_event_and_ends_by_the_state(cli, fleet):
    fleet.damage(5)
    code, out, _ = cli("watch --seconds 0.5")
    assert code == 3
    assert "all is violated: " in out
    code, out, _ = cli("watch --seconds 0.5 --json")
    assert json.loads(out.splitlines()[0])["event"] == "state"


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("ack", ("what was seen must be named", "--all")),
        ("ack x --all", ("everything, or what is named",)),
        ("ack --ranks 0 --undo", ("an incident must be named",)),
        ("sweep --slots 9-3", ("--slots='9-3'", "4096-8191")),
        ("sweep --ranks 9-3", ("--ranks='9-3'", "0-7,12")),
        ("pause --ranks x", ("--ranks='x'",)),
        ("status --token-file /no/such", ("token_file", "/no/such", "cannot be read")),
        ("status --url ftp://x", ("--url='ftp://x'", "http://HOST:PORT")),
        ("status --url http://x:99999", ("--url=", "not the URL")),
        ("watch --interval 0", ("--interval='0'",)),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(line, texts, capsys):
    code = run(line.split())
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for text in texts:
        assert text in err


def test_a_wrong_token_is_one_line_with_the_remedy(cli, monkeypatch):
    monkeypatch.setenv("KV_CANARY_TOKEN", "wrong-0123456789abcdef")
    code, out, err = cli("status")
    assert (code, out) == (2, "")
    assert "--token-file FILE, or set KV_CANARY_TOKEN_FILE" in err
    assert "wrong-0123" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", ["status", "watch", "sweep --wait", "incidents", "ack --all", "drill"])
def test_a_service_that_does_not_answer_is_blind(line, capsys, monkeypatch):
    monkeypatch.setenv("KV_CANARY_URL", "http://127.0.0.1:9")
    assert run(line.split()) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: no service answers at http://127.0.0.1:9: Connection refused. "
        "Start `canary-obs serve`, or give --url.\n"
    )


def test_another_program_on_the_port_is_named(capsys, monkeypatch, tmp_path):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        assert run(["status", "--url", f"http://127.0.0.1:{server.server_port}"]) == 4
        thread.join()
    assert "not as a service of canary_obs" in capsys.readouterr().err


def test_tokens_are_never_printed(cli, fleet):
    for line in ("status", "sweeps", "settings", "incidents"):
        assert TOKEN not in "".join(map(str, cli(line)))

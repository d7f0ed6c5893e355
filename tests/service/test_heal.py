"""What operators see of healing, and how they change it."""

from __future__ import annotations

from canary_obs.heals import Heal, HealStatus
from canary_obs.records import Heals, SetHealing, Violations
from canary_obs.vocabulary import HealAction, HealOutcome, HealPolicy
from tests.service.fakes import snapshot, violation

LIMITED = HealStatus(
    policy=HealPolicy.PROTECT,
    effective=HealPolicy.DRY_RUN,
    why="more than 30 actions within a minute",
    pool_blocks=500,
    quarantined=(("full", 7),),
)


def test_a_policy_is_sent_to_the_ranks(client, rank):
    answer = client.post("/canary/heal", json={"policy": "protect"})
    assert (answer.status_code, answer.json()["ranks"]) == (202, 1)
    assert rank.received[-1] == SetHealing(policy=HealPolicy.PROTECT)
    client.post("/canary/heal", json={"release": [7]})
    assert rank.received[-1] == SetHealing(release=(7,))
    client.post("/canary/heal", json={"release_all": True, "policy": "off"})
    assert rank.received[-1] == SetHealing(policy=HealPolicy.OFF, release=())


def test_an_unknown_policy_is_refused(client, rank):
    assert client.post("/canary/heal", json={"policy": "everything"}).status_code == 422
    assert not [command for command in rank.received if isinstance(command, SetHealing)]


def test_status_reason_quarantine_and_actions_are_shown(client, rank):
    done = {HealAction.EVICT: {HealOutcome.DONE: 3}}
    rank.send(snapshot(rank.identity, 2, healing=LIMITED, heals=done))
    (shown,) = client.get("/canary/heal").json()["ranks"]
    assert shown["status"]["why"] == LIMITED.why
    assert shown["status"]["quarantined"] == [["full", 7]]
    assert shown["actions"] == {"evict": {"done": 3}}


def test_an_incident_has_what_was_done_about_it(client, rank, hub):
    rank.send(Violations(identity=rank.identity, rows=(violation(),)))
    (incident,) = hub.incidents.newest_first()
    heal = Heal(
        action=HealAction.END, outcome=HealOutcome.DONE, policy=HealPolicy.PROTECT, group="full", block=3,
        time_ns=1, request="r", incident=incident.id,
    )  # fmt: skip
    rank.send(Heals(identity=rank.identity, rows=(heal,)))
    assert hub.incidents.find(incident.id).heals == (heal,)


def test_metrics_show_policy_limit_and_actions(client, rank):
    done = {HealAction.EVICT: {HealOutcome.DONE: 3}}
    rank.send(snapshot(rank.identity, 2, healing=LIMITED, heals=done))
    page = client.get("/metrics").text
    found = {line.partition("{")[0]: line for line in page.splitlines() if "heal" in line and "#" not in line}
    assert found["kv_canary_heal_limited"].endswith(" 1.0")
    assert found["kv_canary_heal_quarantined_blocks"].endswith(" 1.0")
    assert 'action="evict"' in found["kv_canary_heals_total"]
    assert found["kv_canary_heals_total"].endswith(" 3.0")
    followed = [line for line in page.splitlines() if "heal_policy{" in line and line.endswith(" 1.0")]
    assert ["dry_run" in line for line in followed] == [True]

"""Prompts computed in one process, answers in another: what arrives is verified before it is used."""

from __future__ import annotations

from itertools import product

import pytest

from canary_obs.hub.hub import Hub
from canary_obs.records import Violations
from canary_obs.telemetry.exposition import Exposition
from canary_obs.telemetry.prometheus import HubCollector
from canary_obs.vocabulary import Cause, Mode, PerturbMode, Phase, Reason, State
from tests.reference_engine.disaggregated import Report, alone, serve, traffic
from tests.reference_engine.two_engines import Ranks, ranks
from tests.service.fakes import hello
from tests.sizes import sized

# Modes of perturbation that share a run.
RUNS = sized({mode.value: [mode] for mode in PerturbMode}, {"all": list(PerturbMode)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with ranks(1, 1, tmp_path_factory.mktemp("pair")) as started:
        yield started


def test_answers_are_those_of_one_engine(pair: Ranks) -> None:
    prefill, decode = pair.run(serve, count=9)
    assert decode.outputs == alone(9)
    assert prefill.violations == decode.violations == []
    assert prefill.statistics["prefix_hit_tokens"] > 0
    full = decode.final.groups["full"]
    assert full.hashed[Phase.HEAD] > 100
    assert sum(full.unverified.values()) == 0


MODELS = {  # and the shortest prompt
    "fp8": 24, "int8": 24, "mla": 24, "mla_sparse": 24, "swa": 24, "speculative": 24, "compressed": 250,
}  # fmt: skip


@pytest.mark.parametrize(("model", "shortest"), MODELS.items())
def test_every_byte_of_a_slot_travels(pair: Ranks, model: str, shortest: int) -> None:
    """Scales, index keys, windows, drafts: without them the answers would differ, or the fingerprints."""
    prefill, decode = pair.run(serve, count=6, model=model, shortest=shortest)
    assert decode.outputs == alone(6, model, shortest)
    assert prefill.violations == decode.violations == []
    for name, group in decode.final.groups.items():
        if not name.endswith("_state"):  # what is sent has no incomplete runs
            assert group.hashed[Phase.HEAD] > (5 if name.startswith("c128") else 50), name
        assert sum(group.unverified.values()) == 0, name


def test_missing_index_keys_are_said_to_be_index_keys(pair: Ranks) -> None:
    _, decode = pair.run(serve, sender="NoIndexKeys", model="mla_sparse", shortest=24)
    assert before_use(decode) == [(Phase.HEAD, Reason.KV_DATA)] * 24
    assert {violation.group for violation in decode.violations} == {"indexer"}


@pytest.mark.parametrize(
    ("sender", "model", "groups"),
    [
        ("NoWindows", "swa", {"swa"}), ("DamagedWindow", "swa", {"swa"}),
        ("NoEntries", "compressed", {"c4", "c4_indexer"}), ("DamagedEntry", "compressed", {"c4"}),
        ("NoWindows", "compressed", {"swa"}), ("NoDraft", "speculative", {"draft"}),
    ],
)  # fmt: skip
def test_a_part_that_is_damaged_or_missing_is_named(
    pair: Ranks, sender: str, model: str, groups: set[str]
) -> None:
    prefill, decode = pair.run(serve, sender=sender, model=model, shortest=MODELS[model])
    assert prefill.violations == []
    assert set(before_use(decode)) == {(Phase.HEAD, Reason.KV_DATA)}
    assert {violation.group for violation in decode.violations if violation.phase is Phase.HEAD} == groups
    if sender.startswith("Damaged"):
        assert len({v.slot for v in decode.violations if v.phase is Phase.HEAD}) == 1


def before_use(report: Report) -> list[tuple[Phase, Reason]]:
    """What was found before the first forward of any request was over."""
    first = min(report.first_steps.values())
    return [(v.phase, v.reason) for v in report.violations if v.step <= first and v.phase is Phase.HEAD]


LANDING = {(Phase.HEAD, Reason.KV_DATA)}


@pytest.mark.parametrize(
    ("sender", "reasons", "slots"),
    [
        ("Truncated", LANDING, 4),
        ("MissingLayer", LANDING, 6),
        ("Reordered", LANDING, 2),
        ("Duplicated", LANDING, 1),
        ("Misdirected", LANDING, 6),
        ("DamagedAtSource", LANDING, 1),
        (
            "WrongSource",
            {(Phase.HEAD, Reason.POSITION), (Phase.HEAD, Reason.CHAIN)},
            7,
        ),  # and the token after
    ],
)
def test_a_damaged_transfer_is_caught_before_its_first_use(
    pair: Ranks, sender: str, reasons: set[tuple[Phase, Reason]], slots: int
) -> None:
    prefill, decode = pair.run(serve, sender=sender)
    assert set(before_use(decode)) <= reasons
    assert set(before_use(decode)) & reasons
    caught = {v.slot + offset for v in decode.violations for offset in range(v.slots)}
    assert len(caught) == slots
    assert prefill.violations == []
    # Mode log: counted and shown, and the request goes on.
    assert len(next(iter(decode.outputs.values()))) == 6 + 8


def test_mode_raise_stops_before_damaged_bytes_are_used(pair: Ranks) -> None:
    _, decode = pair.run(serve, sender="DamagedAtSource", mode=Mode.RAISE)
    assert decode.raised
    assert decode.first_steps == {}
    assert {v.reason for v in decode.violations} == {Reason.KV_DATA}


def test_mode_raise_lets_a_sound_transfer_through(pair: Ranks) -> None:
    _, decode = pair.run(serve, count=4, mode=Mode.RAISE)
    assert not decode.raised
    assert decode.outputs == alone(4)


@pytest.mark.parametrize("decode_data", ["partial", "none"])
def test_another_coverage_is_unverified_and_no_false_alarm(pair: Ranks, decode_data: str) -> None:
    _, decode = pair.run(serve, count=4, decode_data=decode_data)
    assert decode.outputs == alone(4)
    assert decode.violations == []
    unverified = decode.final.groups["full"].unverified
    assert unverified[Cause.ADOPTED] + unverified[Cause.BASELINE] > 0


@pytest.mark.parametrize(("prefill_page", "decode_page"), [(1, 16), (16, 1), (4, 4)])
def test_pages_of_other_sizes(pair: Ranks, prefill_page: int, decode_page: int) -> None:
    sizes = {"page_size": (prefill_page, decode_page)}
    _, decode = pair.run(serve, count=6, engine=sizes)
    assert decode.outputs == alone(6)
    assert decode.violations == []


@pytest.mark.parametrize(
    ("model", "steps"),
    sized(
        [("llama", 250), ("swa", 120), ("speculative", 100), ("compressed", 100)],
        [("llama", 250), ("swa", 120)],
    ),
)
def test_traffic_is_clean(pair: Ranks, model: str, steps: int) -> None:
    prefill, decode = pair.run(traffic, steps=steps, model=model)
    for report in (prefill, decode):
        assert report.violations == []
        assert report.state == (State.OK, ())
        assert sum(sum(group.unverified.values()) for group in report.final.groups.values()) == 0
        assert report.statistics["aborts"] > 0
        if model != "compressed":  # a few large pages
            assert report.statistics["evictions"] > 0
    assert decode.statistics["prefix_hit_tokens"] > 500
    assert decode.statistics["requests_finished"] > 10
    if model == "llama":
        assert decode.statistics["preemptions"] > 0
        assert decode.statistics["requests_finished"] > 50


@pytest.mark.slow
@pytest.mark.parametrize(("model", "group"), [("swa", "swa"), ("compressed", "c4"), ("speculative", "draft")])
def test_no_fault_in_a_part_of_its_own_is_missed(pair: Ranks, model: str, group: str) -> None:
    reports = pair.run(
        traffic, steps=140, model=model, perturb="real_kv_used=0.2,real_kv_unused_cache=0.2",
        perturb_enabled=True, perturb_seed=7, perturb_group=group, patrol_budget="50%", sweep_interval=40,
    )  # fmt: skip
    for report in reports:
        for tally in report.injections.values():
            assert tally["detected"] > 2
            assert (tally["missed"], tally["open"]) == (0, 0)


@pytest.mark.parametrize("modes", RUNS.values(), ids=RUNS)
def test_no_planted_fault_is_missed(pair: Ranks, modes: list[PerturbMode]) -> None:
    reports = pair.run(
        traffic, steps=90, perturb=",".join(f"{mode}=0.2" for mode in modes), perturb_enabled=True,
        perturb_seed=7, patrol_budget="50%", sweep_interval=40,
    )  # fmt: skip
    for report, mode in product(reports, modes):
        tally = report.injections[mode]
        if mode == "next_token_swap" and report is reports[0]:  # prefill adds no single tokens
            assert set(tally["skipped"]) == {"fewer than two requests add one token each"}
        else:
            assert tally["detected"] > sized(2, 0), mode
        assert (tally["missed"], tally["open"]) == (0, 0), mode


@pytest.mark.parametrize(("prefill", "decode"), sized([(1, 2), (2, 1)], [(2, 1)]))
def test_shards_add_up(tmp_path, prefill: int, decode: int) -> None:
    with ranks(prefill, decode, tmp_path) as started:
        clean = started.run(serve, count=5)
        damaged = started.run(serve, count=1, sender="DamagedAtSource")
        truncated = started.run(serve, count=1, sender="Truncated")
    for report in clean[prefill:]:
        assert report.outputs == alone(5)
        assert report.final.groups["full"].hashed[Phase.HEAD] > 50
        assert sum(report.final.groups["full"].unverified.values()) == 0
    assert all(report.violations == [] for report in clean)
    for reports in (damaged, truncated):
        assert all(report.violations == [] for report in reports[:prefill])
    found = [v for report in damaged[prefill:] for v in report.violations if v.phase is Phase.HEAD]
    assert {v.reason for v in found} == {Reason.KV_DATA}
    assert len({v.slot for v in found}) == 1
    for report in truncated[prefill:]:
        assert len({v.slot for v in report.violations if v.phase is Phase.HEAD}) == 4


def test_of_two_prefill_engines_the_one_whose_bytes_arrive_damaged_is_named(tmp_path) -> None:
    """Through a hub to the series that the fleet's rules judge links by."""
    senders = {"prefill-0": "KVSender", "prefill-1": "DamagedAtSource"}
    with ranks(2, 1, tmp_path, prefill_engines=2) as three:
        *_, decode = three.run(serve, count=4, sender=senders)
    assert {name.rsplit("-", 1)[0] for name in decode.outputs} == set(senders)
    assert [violation.peer for violation in decode.violations if not violation.redetection] == [
        "prefill-1"
    ] * 4
    hub, who = Hub(), decode.final.identity
    hub.ingest(hello(who), lambda command: None)
    hub.ingest(Violations(identity=who, rows=tuple(decode.violations)), lambda command: None)
    lines = Exposition(HubCollector(hub)).page("")[0].decode().splitlines()
    (line,) = [line for line in lines if line.startswith("kv_canary_transferred_findings_total{")]
    assert 'peer="prefill-1"' in line
    assert float(line.rsplit(" ", 1)[1]) == 4

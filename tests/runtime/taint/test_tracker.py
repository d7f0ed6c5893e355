"""Which requests are said to have read damage, by what an engine showed; no engine and no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from canary_obs.engine_api.requests import (
    AddedBlocks,
    BlockTable,
    ChangedRequests,
    GrownBlocks,
    RequestChange,
    StoredIn,
)
from canary_obs.records import Violation
from canary_obs.runtime.taint.damage import Damage
from canary_obs.runtime.taint.good_checks import GoodChecks
from canary_obs.runtime.taint.reading import Readers
from canary_obs.runtime.taint.tracker import NOT_SHOWN, TaintTracker
from canary_obs.vocabulary import GoodCheck, Part, Phase, Reason
from tests.service.fakes import identity

SIZE = 4  # tokens of a block
TABLES = {"full": BlockTable("0", SIZE, SIZE), "draft": BlockTable("0", SIZE, SIZE)}


class Engine:
    """Shows what an engine would, in steps."""

    def __init__(self, tables: dict[str, BlockTable] = TABLES, **checks: Any) -> None:
        self.step = 0
        self.patrolled: dict[int, int] = {}
        self.doubt: str | None = None
        self.elsewhere: StoredIn | None = None  # where copies of blocks may be stored
        good = GoodChecks(
            checks.pop("written", lambda group, slot: None), lambda group, slot: self.patrolled.get(slot),
            **({"hits_compared": True} | checks),
        )  # fmt: skip
        self.tracker = TaintTracker(tables, {"0": 64}, good, lambda: self.doubt, lambda: self.elsewhere)
        self.lengths: dict[str, int] = {}

    def show(self, *changed: RequestChange, ended: dict[str, int | None] | None = None) -> None:
        self.tracker.follow(ChangedRequests(ended=ended or {}, changed=changed), self.step)

    def begin(
        self, name: str, blocks: list[int], *, joined: int = 0, loaded: int = 0, prompt: int | None = None,
        emitted: int | None = None,
    ) -> None:  # fmt: skip
        """It begins in the next forward; its prompt fills the blocks, but for one token.

        `loaded`: so many blocks after the joined ones. `emitted`: it was preempted, and comes back.
        """
        self.lengths[name] = len(blocks)
        added = {"0": AddedBlocks(np.array(blocks), 0, joined)}
        prompt = len(blocks) * SIZE - 1 if prompt is None else prompt
        change = RequestChange(
            request=name, begins=True, prompt=prompt, computed=(joined + loaded) * SIZE, added=added,
            emitted=emitted,
        )  # fmt: skip
        self.show(change)

    def grow(self, name: str, blocks: list[int]) -> None:
        first = self.lengths[name]
        self.lengths[name] += len(blocks)
        added = {"0": AddedBlocks(np.array(blocks), first, 0)}
        self.show(RequestChange(request=name, begins=False, prompt=0, computed=first * SIZE, added=added))

    def end(self, name: str, emitted: int | None = None) -> None:
        self.show(ended={name: emitted})

    def forward(self, count: int = 1) -> None:
        self.step += count

    def find(self, block: int, *, incident: str = "i", **changes: Any) -> None:
        self.tracker.found([finding(block, self.step, **changes)], incident, self.step)

    @property
    def damages(self) -> list[Damage]:
        return list(self.tracker.damages.values())

    def tainted(self, damage: int = -1) -> dict[str, tuple[int, bool]]:
        """First forward, and whether it is derived, by request."""
        names = self.tracker.readers.lives.names
        own = self.damages[damage].readings.values()
        return {names[one.life]: (one.step, one.derived) for one in own}


def finding(
    block: int, step: int, phase: Phase = Phase.SWEEP, reason: Reason = Reason.KV_DATA,
    request: str | None = None, **changes: Any,
) -> Violation:  # fmt: skip
    slot = changes.pop("slot", block * SIZE + 1)
    fields = {
        "group": "full", "part": Part.K, "event": 1, "position": None, "expected": "0x1", "actual": "0x2",
        "lag_steps": 0, "time_ns": 0,
    }  # fmt: skip
    return Violation(phase=phase, reason=reason, step=step, slot=slot, request=request, **(fields | changes))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_everyone_who_held_the_block_since_it_was_filled(engine: Engine) -> None:
    engine.begin("writer", [1, 2])
    engine.begin("other", [3])
    engine.forward(3)
    engine.end("writer", 2)
    engine.find(2)
    assert engine.tainted() == {"writer": (1, False)}
    (damage,) = engine.damages
    assert (damage.good.check, damage.good.step, damage.cause) == (GoodCheck.WRITTEN, 1, None)


def test_a_block_that_nobody_read_since_its_last_check(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward(3)
    engine.end("writer")
    engine.begin("next", [2])
    engine.forward(2)
    engine.patrolled[1 * SIZE + 1] = 3
    engine.find(1)
    assert (engine.tainted(), engine.damages[0].cause) == ({}, None)
    assert engine.damages[0].good.check is GoodCheck.PATROL


@pytest.mark.parametrize("compared", [True, False])
def test_a_comparison_of_a_hit_is_a_good_check(compared: bool) -> None:
    engine = Engine(hits_compared=compared)
    engine.begin("writer", [1])
    engine.forward(2)
    engine.end("writer")
    engine.begin("reader", [1, 2], joined=1)
    engine.forward(2)
    engine.find(1)
    assert set(engine.tainted()) == ({"reader"} if compared else {"reader", "writer"})


def test_the_hit_that_finds_it_is_none(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward(2)
    engine.end("writer")
    engine.begin("reader", [1, 2], joined=1)
    engine.forward()
    engine.find(1, phase=Phase.HIT)
    assert set(engine.tainted()) == {"writer", "reader"}


def test_what_was_there_before_a_block_is_filled_again(engine: Engine) -> None:
    engine.begin("before", [1])
    engine.forward(2)
    engine.end("before")
    engine.begin("next", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD)
    assert set(engine.tainted()) == {"before"}


def test_what_has_just_arrived_is_read_by_who_holds_it(engine: Engine) -> None:
    engine.begin("before", [1])
    engine.forward(2)
    engine.end("before")
    engine.begin("next", [1])
    engine.find(1, phase=Phase.HEAD, reason=Reason.LOST_LOAD, peer="host")
    assert set(engine.tainted()) == {"next"}


def test_what_a_load_writes_over_was_read_by_who_held_it_before() -> None:
    engine = Engine(before_load=lambda row: row.event == 7)
    engine.begin("before", [1])
    engine.forward(2)
    engine.end("before")
    engine.begin("next", [1])
    engine.find(1, phase=Phase.HEAD, event=7)
    assert [one.overwritten for one in engine.tracker.reached()] == [True]
    engine.begin("late", [1, 2], joined=1)
    assert engine.tainted() == {"before": (1, False)}


def test_what_has_arrived_for_a_request_that_begins_later(engine: Engine) -> None:
    engine.find(1, phase=Phase.HEAD, peer="host")
    assert not any(damage.readings for damage in engine.damages)
    engine.forward(3)
    engine.begin("late", [1])
    assert engine.tainted(0) == {"late": (4, False)}


def test_tokens_that_may_be_written_twice_are_read_by_their_writer(engine: Engine) -> None:
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("writer", [1])
    engine.forward(2)
    engine.find(1, phase=Phase.HEAD)
    assert set(engine.tainted()) == {"writer"}


def test_a_state_that_its_request_writes_over_was_read_by_that_request_or_the_one_before() -> None:
    engine = Engine({"full": BlockTable("0", SIZE, 100, rewritten=True)})
    engine.begin("before", [1], prompt=5)
    engine.forward()
    engine.end("before", 3)
    engine.begin("writer", [1], prompt=5)
    engine.forward(2)
    engine.find(1, phase=Phase.HEAD)
    assert set(engine.tainted()) == {"before", "writer"}


@pytest.mark.parametrize(("prompt", "readers"), [(6, {"before", "next"}), (9, {"next"})])
def test_an_entry_of_several_tokens_is_written_with_the_last_of_them(prompt: int, readers: set[str]) -> None:
    """Of 8 tokens in two entries; a request of 6 leaves the second one as it was."""
    engine = Engine({"full": BlockTable("0", 2, 8)})
    engine.begin("before", [1], prompt=8)
    engine.forward()
    engine.end("before", 2)
    engine.begin("next", [1], prompt=prompt)
    engine.forward()
    engine.end("next", 1)
    engine.find(1, slot=1 * 2 + 1)
    assert set(engine.tainted()) == readers


def test_what_a_drafting_request_wrote_over_was_read_by_who_held_the_slot_before() -> None:
    slot, step = 1 * SIZE + 1, 3  # the row is read after the forward that wrote over the slot
    engine = Engine(written=lambda group, at: step if at == slot else None)
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("reader", [1])
    engine.forward(2)
    engine.end("reader", 2)
    engine.begin("drafting", [1])
    engine.forward()
    assert engine.step == step
    engine.find(1, phase=Phase.HEAD)
    assert engine.tainted() == {"reader": (1, False)}  # and not by who filled it anew
    engine.begin("joins what was filled anew", [1, 2], joined=1)
    assert set(engine.tainted()) == {"reader"}


def test_what_a_request_read_after_it_came_back_is_another_damage_than_what_its_block_held_before() -> None:
    engine = Engine()
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("before", [1])
    engine.forward(2)
    engine.end("before", 2)
    engine.begin("drafting", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD)
    engine.end("drafting", 0)
    engine.begin("drafting", [1], emitted=0)
    engine.forward(3)
    engine.end("drafting", 3)
    engine.begin("next", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD)
    assert [set(engine.tainted(number)) for number in (0, 1)] == [{"before"}, {"drafting"}]


def test_damage_met_once_more_as_its_block_is_filled_anew_is_not_the_one_that_comes_then() -> None:
    slot = 1 * SIZE + 1
    engine = Engine()
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("reader", [1])
    engine.forward(2)
    engine.find(1)
    engine.end("reader", 2)
    engine.begin("next", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD, redetection=True)
    assert [engine.tainted(number) for number in range(len(engine.damages))] == [{"reader": (1, False)}]
    engine.grow("next", [3])  # it has filled the block
    engine.begin("joins", [1, 2], joined=1)
    engine.forward(2)
    engine.find(1, slot=slot + 1)
    assert [set(engine.tainted(number)) for number in (0, 1)] == [{"reader"}, {"next", "joins"}]


@pytest.mark.parametrize("held", [True, False])
def test_who_ended_after_he_wrote_over_damage_had_not_written_the_slot_before(held: bool) -> None:
    engine = Engine()
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("reader", [1])
    engine.forward(2)
    engine.end("reader", 2)
    engine.begin("drafting", [1])
    engine.forward()
    row = finding(1, engine.step, phase=Phase.HEAD)
    engine.end("drafting", 3)
    if held:
        engine.begin("next", [1])
    engine.forward(2)
    engine.tracker.found([row], "i", engine.step)  # as a GPU's rows are read
    assert set(engine.tainted()) == {"reader"}


def test_who_came_back_and_emitted_nothing_more_may_not_have_come_to_a_slot() -> None:
    engine = Engine()
    engine.tracker.follow(ChangedRequests(rewrites=True), 0)
    engine.begin("before", [1])
    engine.forward()
    engine.end("before", 2)
    engine.begin("drafting", [2])
    engine.forward()
    engine.end("drafting", 3)
    engine.begin("drafting", [1], emitted=3)
    engine.forward()
    engine.end("drafting", 3)
    engine.begin("next", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD)
    assert set(engine.tainted()) == {"before", "drafting"}


def test_blocks_that_a_reader_filled_taint_those_who_join_them(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.end("writer")
    engine.begin("reader", [1, 2, 3], joined=1)
    engine.forward()
    engine.end("reader")
    engine.begin("third", [2, 4], joined=1)
    engine.begin("apart", [5])
    engine.forward()
    engine.begin("fourth", [4, 6], joined=1)
    engine.forward()
    engine.find(1)
    assert engine.tainted() == {
        "reader": (2, False), "third": (3, True), "fourth": (4, True)
    }  # fmt: skip


def test_blocks_that_a_reader_had_filled_before_taint_nobody(engine: Engine) -> None:
    engine.begin("reader", [1, 2, 3])
    engine.forward()
    engine.grow("reader", [4])
    engine.forward(4)
    engine.begin("joiner", [2, 5], joined=1)
    engine.forward()
    engine.find(4)
    assert set(engine.tainted()) == {"reader"}


def test_readers_after_the_finding_are_added_until_the_block_is_filled_again(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.find(1)
    engine.end("writer")
    engine.forward()
    engine.begin("later", [1, 2], joined=1)
    assert engine.tainted() == {"writer": (1, False), "later": (3, False)}
    engine.begin("joins its blocks", [2, 3], joined=1)
    assert engine.tainted()["joins its blocks"] == (3, True)
    engine.begin("fills it", [1])
    engine.forward()
    engine.begin("joins that", [1, 9], joined=1)
    assert set(engine.tainted()) == {"writer", "later", "joins its blocks"}


def test_what_a_tainted_request_fills_later_is_wrong(engine: Engine) -> None:
    engine.begin("reader", [1])
    engine.forward()
    engine.find(1)
    engine.grow("reader", [2])
    engine.forward()
    engine.begin("joiner", [2, 3], joined=1)
    assert set(engine.tainted()) == {"reader", "joiner"}


@pytest.mark.parametrize("unfollowed", [0, 1])
def test_one_block_more_of_several_requests(engine: Engine, unfollowed: int) -> None:
    engine.begin("reader", [1])
    engine.begin("other", [2])
    engine.forward()
    engine.find(1)
    stranger = ["not followed"] if unfollowed else []
    names, blocks = [*stranger, "reader", "other"], [9, 3, 4][-2 - unfollowed :]
    grown = {"0": GrownBlocks(names, blocks, [1] * len(names), [4] * len(names))}
    engine.tracker.follow(ChangedRequests(grown=grown), engine.step)
    engine.forward()
    engine.begin("joins the reader", [3, 5], joined=1)
    engine.begin("joins the other", [4, 6], joined=1)
    assert set(engine.tainted()) == {"reader", "joins the reader"}


def test_a_wrong_table_taints_its_request_alone(engine: Engine) -> None:
    engine.begin("owner", [1])
    engine.begin("misled", [2])
    engine.forward(2)
    engine.find(1, phase=Phase.HEAD, reason=Reason.CHAIN, request="misled")
    assert engine.tainted() == {"misled": (2, False)}
    assert engine.damages[0].good.check is GoodCheck.FORWARD


def test_a_damaged_record_taints_all_who_read_its_slot_in_that_forward(engine: Engine) -> None:
    engine.begin("ended", [1])
    engine.forward()
    engine.end("ended")
    engine.begin("one", [1, 2], joined=1)
    engine.begin("two", [1, 3], joined=1)
    engine.forward()
    engine.find(1, phase=Phase.HEAD, reason=Reason.POSITION, request="one")
    assert set(engine.tainted()) == {"one", "two"}


def test_another_request_that_fails_the_same_check_is_added(engine: Engine) -> None:
    engine.begin("one", [1])
    engine.begin("two", [2])
    engine.forward()
    engine.find(3, phase=Phase.HEAD, reason=Reason.CHAIN, request="one")
    engine.find(3, phase=Phase.HEAD, reason=Reason.CHAIN, request="two", redetection=True)
    assert len(engine.damages) == 1
    assert set(engine.tainted()) == {"one", "two"}


def test_the_same_words_in_a_block_that_was_filled_again_are_new_damage(engine: Engine) -> None:
    engine.begin("first", [1])
    engine.forward()
    engine.find(1)
    engine.find(1, redetection=True)
    assert len(engine.damages) == 1
    engine.end("first")
    engine.begin("second", [1])
    engine.forward()
    engine.find(1, redetection=True)
    assert engine.tainted() == {"second": (2, False)}


def test_an_older_good_check_of_another_slot_widens_the_interval(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.end("writer")
    engine.begin("other", [2])
    engine.forward(3)
    engine.patrolled[1 * SIZE] = 3
    engine.find(1, slot=1 * SIZE)
    assert engine.tainted() == {}
    engine.find(1, slot=1 * SIZE + 1)
    assert len(engine.damages) == 1
    assert set(engine.tainted()) == {"writer"}


def test_finished_requests_that_are_forgotten_are_never_nobody() -> None:
    engine = Engine()
    engine.tracker.readers = Readers(TABLES, rows_kept=8, lives_kept=4)
    engine.begin("writer", [1])
    engine.forward()
    engine.end("writer")
    for number in range(8):
        engine.begin(f"r{number}", [2 + number])
        engine.forward()
        engine.end(f"r{number}")
    engine.find(1)
    cause = engine.damages[-1].cause
    assert "are forgotten" in (cause or "")
    engine.patrolled[1 * SIZE + 1] = engine.step
    engine.find(1, incident="next")
    assert (engine.tainted(), engine.damages[-1].cause) == ({}, None)


def test_requests_that_run_and_do_not_fit_are_not_known_until_they_end() -> None:
    engine = Engine()
    engine.tracker.readers = Readers(TABLES, rows_kept=4, lives_kept=4)
    engine.begin("long", [1, 2, 3, 4, 5])
    engine.forward()
    engine.patrolled[1 * SIZE + 1] = engine.step
    engine.forward()
    engine.find(1)
    assert engine.damages[-1].cause is not None
    engine.end("long")
    engine.forward(2)
    engine.patrolled[1 * SIZE + 1] = engine.step
    engine.begin("new", [6])
    engine.find(1, incident="next")
    assert (engine.tainted(), engine.damages[-1].cause) == ({}, None)


@pytest.mark.parametrize("running", [1, None])
def test_requests_from_before_the_attach_are_not_known(engine: Engine, running: int | None) -> None:
    engine.tracker.start(running, 0)
    engine.find(1)
    cause = engine.damages[0].cause
    assert "attached" in (cause or "")


def test_reasons_to_doubt(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.doubt = "forwards were not shown"
    engine.find(1)
    assert engine.damages[0].cause == "forwards were not shown"
    engine.tracker.lost(None)
    engine.find(2)
    assert "fault of the canary" in (engine.damages[1].cause or "")


def test_findings_that_were_dropped(engine: Engine) -> None:
    """Others of that moment are not known, and a hit before it may have been one of them."""
    engine.begin("writer", [1])
    engine.forward()
    engine.end("writer")
    engine.begin("reader", [1, 2], joined=1)
    engine.forward()
    engine.tracker.found([finding(5, engine.step)], "i", engine.step, dropped=True)
    assert "findings were dropped" in (engine.damages[0].cause or "")
    engine.forward()
    engine.find(1)
    assert (set(engine.tainted()), engine.damages[1].cause) == ({"reader", "writer"}, None)


def test_forwards_that_were_not_shown_may_have_read(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward()
    engine.tracker.lost(engine.step + 1)
    engine.find(1)
    assert engine.damages[0].cause is not None


def test_groups_that_are_not_followed(engine: Engine) -> None:
    engine.find(1, group="state")
    assert (engine.tainted(), engine.damages[0].cause) == ({}, NOT_SHOWN)


def test_a_request_of_a_row_that_is_not_known_any_more(engine: Engine) -> None:
    engine.begin("one", [1])
    engine.forward()
    engine.find(1, phase=Phase.HEAD, reason=Reason.CHAIN)
    assert engine.damages[0].cause == "the request that read it is no longer known"


def test_tokens_since_the_damage(engine: Engine) -> None:
    engine.begin("writer", [1, 2], prompt=5)
    engine.forward(3)
    engine.grow("writer", [3])
    engine.forward(2)
    engine.patrolled[1 * SIZE + 1] = 3
    engine.find(1)
    damage = engine.damages[0]
    (row,) = damage.message(identity(), engine.tracker.readers, {"writer": 9}).requests
    # Eight tokens were there before forward 4: it emits the fourth output of a prompt of five.
    assert (row.running, row.step, row.first_output, row.outputs) == (True, 4, 4, 5)
    damage.sent()
    engine.end("writer", 12)
    (row,) = damage.message(identity(), engine.tracker.readers, {}).requests
    assert (row.running, row.first_output, row.outputs) == (False, 4, 8)


def test_a_preempted_request_is_one_entry_from_its_first_reading_on(engine: Engine) -> None:
    engine.begin("writer", [1], prompt=2)
    engine.forward()
    engine.find(1)
    engine.show(ended={"writer": 3})
    engine.begin("writer", [1, 5], joined=1, prompt=2)
    engine.forward()
    (row,) = engine.damages[0].message(identity(), engine.tracker.readers, {"writer": 6}).requests
    assert (row.step, row.first_output, row.outputs) == (1, 0, 6)


def test_who_fills_a_block_anew_has_not_read_what_he_has_not_come_to(engine: Engine) -> None:
    engine.tracker._checks._written = lambda group, slot: 2
    engine.begin("writer", [1], prompt=2)
    engine.forward(3)
    engine.begin("reader", [1], joined=1)
    engine.forward()
    engine.end("writer", 2)
    engine.end("reader", 1)
    engine.begin("next", [1], prompt=1)
    engine.forward()
    engine.find(1)
    assert set(engine.tainted()) == {"writer", "reader"}
    (reached,) = engine.tracker.reached()
    assert (reached.overwritten, dict(reached.filled)) == (True, {})


def test_a_request_that_comes_back_with_tokens_from_damage_runs_on_as_a_tainted_one(engine: Engine) -> None:
    engine.begin("writer", [1], prompt=2)
    engine.forward()
    engine.find(1)
    damage = engine.damages[0]

    def entry(**emitted: int) -> tuple[bool, int | None, int | None]:
        assert damage.changed
        (row,) = damage.message(identity(), engine.tracker.readers, emitted).requests
        damage.sent()
        return row.running, row.first_output, row.outputs

    assert entry(writer=3) == (True, 0, 3)
    engine.show(ended={"writer": 4})
    assert entry() == (False, 0, 4)
    engine.begin("writer", [5], prompt=2, emitted=3)  # one was dropped
    assert entry(writer=3) == (True, 0, 3)
    engine.forward()
    engine.show(ended={"writer": 5})
    engine.begin("writer", [6], prompt=2, emitted=5)
    assert entry(writer=5) == (True, 0, 5)
    engine.begin("other", [9])
    engine.end("other")
    engine.tracker._forget(engine.step)
    engine.end("writer", 9)
    assert entry() == (False, 0, 9)
    engine.begin("writer", [6], prompt=2)  # another one of that name
    assert not damage.changed


def test_a_request_that_started_again_before_it_sent_a_token_from_damage_is_cured(engine: Engine) -> None:
    engine.begin("writer", [1, 2], prompt=SIZE)
    engine.forward(3)
    engine.patrolled |= {1 * SIZE + 1: 3, 1 * SIZE + 2: 3}
    engine.grow("writer", [3])
    engine.forward(2)
    engine.find(1)
    damage = engine.damages[0]
    assert [one.readers for one in engine.tracker.reached()] == [(("writer", SIZE + 1),)]
    engine.show(ended={"writer": SIZE + 2})
    engine.begin("writer", [5], prompt=SIZE, emitted=SIZE + 1)
    (row,) = damage.message(identity(), engine.tracker.readers, {"writer": SIZE + 9}).requests
    assert (row.running, row.first_output, row.outputs) == (False, SIZE + 1, 0)
    engine.find(1, slot=1 * SIZE + 2)
    assert [one.readers for one in engine.tracker.reached()] == [()]


def test_a_check_of_what_was_written_after_the_finding_is_none_of_it(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward(3)
    engine.end("writer")
    engine.begin("next", [1])
    engine.forward()
    engine.patrolled[1 * SIZE + 1] = engine.step  # of what `next` has written
    engine.find(1, phase=Phase.HEAD)
    assert engine.tainted() == {"writer": (1, False)}


@pytest.mark.parametrize("phase", [Phase.HEAD, Phase.PATROL])
def test_a_slot_that_the_next_holders_of_its_block_never_wrote(engine: Engine, phase: Phase) -> None:
    engine.begin("writer", [1, 2], prompt=SIZE + 1)
    engine.forward(3)
    engine.end("writer", SIZE - 1)
    engine.begin("short", [2], prompt=1)
    engine.forward(2)
    engine.end("short", 1)  # of block 2, it has computed one token
    engine.begin("next", [2], prompt=1)
    engine.forward()
    engine.find(2, phase=phase)
    listed = {"writer", "short"} | ({"next"} if phase is Phase.PATROL else set())
    assert set(engine.tainted()) == listed
    assert engine.damages[0].good.step == 1


SLOTS = {"full": BlockTable("0", 1, 1), "draft": BlockTable("0", 1, 1)}


def test_a_damage_that_is_added_to_reaches_as_far_as_what_was_found_last() -> None:
    engine = Engine({"full": BlockTable("0", SIZE, 100, rewritten=True)})
    engine.begin("before", [1], prompt=5)
    engine.forward()
    engine.find(1, slot=1 * SIZE)
    engine.end("before", 3)
    engine.begin("later", [1], prompt=5)
    engine.forward(2)
    engine.find(1, phase=Phase.HEAD)
    assert len(engine.damages) == 1
    (reached,) = engine.tracker.reached()
    assert (reached.violation.step, dict(reached.readers)["later"]) == (3, 0)


def test_who_joins_a_slot_that_was_put_back_reads_no_damage() -> None:
    engine = Engine(SLOTS)
    engine.begin("reader", [8], prompt=1)
    engine.forward()
    engine.find(8, slot=8)
    assert engine.tracker.repaired("full", 8)
    (reached,) = engine.tracker.reached()
    assert (reached.overwritten, reached.filled) == (True, {})
    engine.begin("later", [8], joined=1)
    engine.forward()
    assert set(engine.tainted()) == {"reader"}
    engine.find(8, slot=8)
    assert len(engine.damages) == 2
    assert {"reader", "later"} == set(engine.tainted())


def test_readers_of_a_slot_that_was_put_back_may_not_all_be_known() -> None:
    engine = Engine(SLOTS)
    engine.begin("writer", [7], prompt=1)
    engine.forward()
    engine.find(7, slot=7)
    engine.begin("reader", [7, 8], joined=1)  # what it computes from damage lies in 8
    engine.forward()
    engine.find(8, slot=8)
    assert not engine.tracker.repaired("full", 8)
    assert not engine.tracker.repaired("draft", 8)
    engine.doubt = "a forward was not shown"
    engine.begin("apart", [9], prompt=1)
    engine.forward()
    engine.find(9, slot=9)
    assert not engine.tracker.repaired("full", 9)


def test_a_slot_that_was_certainly_written_is_that_of_its_last_writer(engine: Engine) -> None:
    engine.begin("writer", [1])
    engine.forward(3)
    engine.end("writer", 1)
    engine.begin("long", [1, 2], prompt=SIZE + 1)
    engine.forward(2)
    engine.end("long", 1)
    engine.find(1)
    assert set(engine.tainted()) == {"long"}

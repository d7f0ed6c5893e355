"""What the table of wrong answers counts as delivered after the detection."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.heal.faults import Faults
from tests.engines.vllm.heal.requests import Answer
from tests.engines.vllm.heal.serve import Listing, Served
from tests.engines.vllm.heal.table import passed, round_of

RIGHT = [7] * 10


def row(*listings: Listing, wrong_from: int = 6) -> dict[str, Any]:
    """One request, delivered a token per step from step 100 on, that turns wrong."""
    wrong = RIGHT[:wrong_from] + [9] * (10 - wrong_from)
    clean = Served(answers={"1.0": Answer(tokens=RIGHT, sent=list(range(100, 110)))})
    answer = Answer(
        tokens=wrong, sent=list(range(100, 110)), behind=[0.0] * wrong_from, wrong_from=wrong_from
    )
    answer.behind += [3.0] * (10 - wrong_from)
    faulty = Served(answers={"1.0": answer}, listed={"1.0": list(listings)} if listings else {})
    return {"policy": "protect"} | round_of(clean, clean, faulty)


def listing(step: int, planted: int | None, damage: int = 1, first_output: int = 0) -> Listing:
    return Listing(
        damage=damage, step=step, first_output=first_output, derived=False, reason="chain", planted=planted
    )


def test_tokens_count_from_the_step_of_the_detection_on() -> None:
    found = row(listing(step=108, planted=104))
    assert found["wrong_tokens_before_detection"] == 2
    assert found["wrong_tokens_after_detection"] == 2
    story = {"wrong_steps": [106, 109], "behind": [3.0] * 3, "listed": [[108, 104, 0, "chain"]]}
    assert found["wrong_delivered_after_detection"] == {"1.0": story}
    assert not passed(found)
    assert not passed(found | {"policy": "repair"})
    assert passed(found | {"policy": "evict"})


def test_a_damage_that_was_planted_and_not_found_yet_explains_a_wrong_token() -> None:
    found = row(listing(step=102, planted=90), listing(step=110, planted=105, damage=2))
    assert found["wrong_tokens_after_detection"] == 0
    assert found["wrong_tokens_before_detection"] == 4
    assert found["wrong_by_a_later_fault"] == ["1.0"]
    assert passed(found)


def test_a_later_damage_explains_nothing_before_it_was_planted_or_in_tokens_before_its_first() -> None:
    cured = listing(step=102, planted=90)
    for later in (
        listing(step=110, planted=107, damage=2),
        listing(step=110, planted=None, damage=2),
        listing(step=110, planted=105, damage=2, first_output=9),
    ):
        found = row(cured, later)
        assert found["wrong_delivered_after_detection"].keys() == {"1.0"}, later
        assert found["wrong_by_a_later_fault"] == []


def test_the_first_fault_in_a_block_that_was_not_found_is_the_cause_of_its_damage() -> None:
    faults = Faults(None, seed=1)  # type: ignore[arg-type]
    faults.places, faults.last = [("one", 5, 3), ("two", 9, 3), ("one", 2, 7)], {3: 9, 7: 2}
    assert [faults.planted_in(block) for block in (3, 7, 8)] == [5, 2, None]
    faults.places.clear()  # all were found
    assert faults.planted_in(3) == 9


def test_a_second_detection_ends_the_excuse() -> None:
    found = row(listing(step=102, planted=90), listing(step=108, planted=105, damage=2))
    assert found["wrong_tokens_after_detection"] == 2


def test_a_wrong_answer_that_is_not_listed_fails_with_its_story() -> None:
    found = row()
    assert found["wrong_not_listed"] == {
        "1.0": {"wrong_steps": [106, 109], "behind": [3.0] * 3, "listed": []}
    }
    assert not passed(found)


def test_an_answer_that_differs_by_rounding_is_not_wrong_and_is_counted() -> None:
    same = Served(answers={"1.0": Answer(tokens=RIGHT, sent=list(range(10)))})
    tie = Answer(
        tokens=[7] * 5 + [8] * 5, sent=list(range(10)), behind=[0.0] * 5 + [0.004, 0.0, 0.0, 0.0, 0.0]
    )
    found = round_of(same, same, Served(answers={"1.0": tie}), Served(answers={"1.0": tie}))
    assert found["right_but_different"] == found["control_right_but_different"] == {"1.0": 0.004}
    assert found["right_but_different_not_listed"] == ["1.0"]
    assert found["wrong_not_listed"] == found["control_wrong"] == {}
    assert passed({"policy": "protect"} | found)


def test_a_listed_answer_that_differs_and_is_not_wrong_is_told_from_one_that_is_not_listed() -> None:
    same = Served(answers={"1.0": Answer(tokens=RIGHT, sent=list(range(10)))})
    tie = Answer(tokens=[8] * 10, sent=list(range(10)), behind=[0.01] + [0.0] * 9)
    faulty = Served(answers={"1.0": tie}, listed={"1.0": [listing(step=3, planted=1)]})
    found = round_of(same, same, faulty)
    assert (found["right_but_different"], found["right_but_different_not_listed"]) == ({"1.0": 0.01}, [])


def test_an_answer_that_is_wrong_without_damage_fails() -> None:
    same = Served(answers={"1.0": Answer(tokens=RIGHT, sent=list(range(10)))})
    wrong = Answer(tokens=[8] * 10, sent=list(range(10)), behind=[2.0] * 10, wrong_from=0)
    found = round_of(same, same, same, Served(answers={"1.0": wrong}))
    assert found["control_wrong"].keys() == {"1.0"}
    assert not passed({"policy": "protect"} | found)

"""Which listings of a rank the table of wrong answers takes for a detection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.hub.taint_store import TaintStore
from canary_obs.records import Tainted
from canary_obs.slot_facts import TaintedRequest
from canary_obs.vocabulary import Completeness, GoodCheck, Phase, Reason
from tests.engines.vllm.heal.faults import Faults
from tests.engines.vllm.heal.serve import Served, _listen
from tests.service.fakes import identity

SIZE = 4  # slots of a block


class Rank:
    """What is listened to, with blocks of a target and of its draft."""

    def __init__(self, *, ahead: bool = False) -> None:
        self.sent: list[Tainted] = []
        self.served, self.taints = Served(), TaintStore()
        self.faults = Faults(None, 1)  # type: ignore[arg-type]
        groups = {
            name: SimpleNamespace(draft=name == "draft", block_slots=SIZE) for name in ("full", "draft")
        }
        taint = SimpleNamespace(send=lambda message: self.sent.append(message) is None)
        self.rig: Any = SimpleNamespace(
            canary=SimpleNamespace(taint=taint),
            worker=SimpleNamespace(execute_model=lambda output: output),
            adapter=SimpleNamespace(_by_name=groups, vllm_groups=[groups["full"]]),
            llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(async_scheduling=ahead)
            ))),
        )  # fmt: skip
        self.restore = _listen(self.rig, self.served, self.taints, self.faults)

    def list(self, step: int, number: int = 1, first: int | None = 3, group: str = "full") -> None:
        """The rank lists request 1.0 in this step, for damage in block 2."""
        self.served.steps = step
        request = TaintedRequest(
            request="1.0-abcdef01", running=True, step=step, derived=False, first_output=first, outputs=0
        )
        assert self.rig.canary.taint.send(
            Tainted(
                identity=identity(), number=number, incident="i", group=group, slot=2 * SIZE + 1,
                reason=Reason.KV_DATA, phase=Phase.HEAD, step=step, good_step=0, cause=None, time_ns=1,
                good_check=GoodCheck.WRITTEN, completeness=Completeness.KNOWN, requests=(request,),
            )
        )  # fmt: skip

    def listed(self) -> list[tuple[int, int, int | None, int | None]]:
        found = self.served.listed.get("1.0", [])
        return [(one.damage, one.step, one.planted, one.first_output) for one in found]


def test_a_damage_is_a_detection_once_with_the_first_token_that_may_be_wrong() -> None:
    rank = Rank()
    rank.faults.places = [("bytes", 7, 2)]
    for step, first in ((10, 5), (12, 3), (14, 6), (15, None)):
        rank.list(step, first=first)
    rank.list(16, number=2)
    assert rank.listed() == [(1, 10, 7, 3), (2, 16, 7, 3)]
    assert len(rank.sent) == 5


def test_tokens_of_the_forward_before_are_on_their_way() -> None:
    rank = Rank(ahead=True)
    rank.list(10)
    assert rank.listed() == [(1, 11, None, 3)]


def test_damage_of_a_draft_is_told_to_the_service_and_is_no_detection() -> None:
    rank = Rank()
    rank.list(10, group="draft")
    assert rank.listed() == []
    assert (len(rank.sent), rank.taints.total) == (1, 1)


@pytest.mark.parametrize(("misled", "listings"), [(9, 1), (10, 1), (11, 2)])
def test_a_wrong_entry_planted_after_the_listing_makes_the_same_damage_another_one(
    misled: int, listings: int
) -> None:
    """What the entry leads to was damaged before: its number is the one that was listed."""
    rank = Rank()
    rank.list(10)
    rank.faults.misled["1.0"] = misled
    rank.list(12)
    rank.list(13)
    assert rank.listed() == [(1, 10, None, 3), (1, 12, misled, 3)][:listings]


def test_what_was_replaced_is_put_back() -> None:
    rank = Rank()
    replaced = rank.rig.canary.taint.send, rank.rig.worker.execute_model
    rank.rig.worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=5))
    rank.restore()
    assert rank.served.scheduled == 5
    assert rank.rig.canary.taint.send not in replaced
    assert rank.rig.worker.execute_model not in replaced

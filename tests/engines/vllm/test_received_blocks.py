"""Records from a prefill engine's ranks to a decode engine's; with NIXL itself: real/test_nixl.py."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from canary_obs.copy_records.sent_records import SentRecords
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.received_blocks import TransferRecords
from canary_obs.engines.vllm.sent_blocks import (
    EXPECTED_ATTRIBUTE,
    PARAMETER,
    SENT_ATTRIBUTE,
    Expected,
    Sent,
    instrument_sends,
)
from canary_obs.engines.vllm.sent_copies import Copies
from tests.engines.vllm.taken_copies import Taken, taken

SIZE, TOKENS = 4, 10  # three blocks, the last of which holds two tokens


class Observer:
    """Each filled slot of a block counts one, per head; block 9 is not complete."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def block_folds(
        self, group: str, slots: torch.Tensor, *, baselines: bool = False, shares: Sequence[range] = ()
    ) -> torch.Tensor:
        blocks, filled = slots[:, 0] // SIZE, (slots >= 0).sum(1)
        whole = (blocks != 9).to(torch.int64)
        folds = [
            torch.stack((whole, filled * heads, -filled * heads), 1)
            for heads in map(len, shares or (range(self._heads),))
        ]
        return torch.stack(folds) if shares else folds[0]

    def record_format(self, group: str) -> int:
        return 7

    def fault(self, part: str, error: Exception) -> None:
        raise error


def rank(first: int, heads: int, copies: Copies | None = None) -> TransferRecords:
    sources = [
        SimpleNamespace(
            layer=layer, part=0, head_start=first, num_heads=heads, head_bytes=64, tensor=torch.zeros(1)
        )
        for layer in (0, 1)
    ]
    view = SimpleNamespace(name="full", sources=sources)
    group: Any = SimpleNamespace(number=0, block_slots=SIZE, view=view, states=False)
    observer: Any = Observer(heads)
    return TransferRecords([group], copies if copies is not None else Copies(), observer)


def scheduler(request: Any) -> Any:
    own = SimpleNamespace(
        connector=SimpleNamespace(build_connector_meta=lambda output: output.kv_connector_metadata),
        requests={request.request_id: request},
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda _: ([3, 5, 8],)),
        update_from_output=lambda scheduled, output: output,
        _connector_finished=lambda request: (True, {
            "do_remote_prefill": True, "remote_block_ids": ([3, 5, 8],), "remote_engine_id": "p",
            "remote_request_id": request.request_id,
        }),
    )  # fmt: skip
    instrument_sends(MethodPatches(), own)
    return own


def output(**more: Any) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={"r": 1}, finished_req_ids=set(), kv_connector_metadata=None, **more
    )


def sent(ranks: list[TransferRecords], computed: int = TOKENS) -> dict[str, Any]:
    """What the prefill engine's router gets."""
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=computed - 1,
        num_prompt_tokens=TOKENS,
    )  # fmt: skip
    own = scheduler(request)
    step(own, ranks, 1)
    params: dict[str, Any] = own._connector_finished(request)[1]
    return params


def step(own: Any, ranks: list[TransferRecords], tokens: int) -> None:
    """One of the prefill engine: the request's next tokens."""
    scheduled = output()
    scheduled.num_scheduled_tokens = {"r": tokens}
    own.connector.build_connector_meta(scheduled)
    found: Any = None
    for each in ranks:
        connector = SimpleNamespace(build_connector_worker_meta=lambda: None)
        each.wrap(MethodPatches(), connector)
        each.follow(scheduled)
        meta = pickle.loads(pickle.dumps(_completed(each, connector.build_connector_worker_meta())))
        found = meta if found is None else found.aggregate(meta)
        assert connector.build_connector_worker_meta() is None, "once"
    given = SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=found))
    own.update_from_output(scheduled, given)
    assert given.kv_connector_output.kv_connector_worker_meta is None


def copy(filled: int, fold: int) -> Taken:
    return Taken(filled, ((fold, -fold),), "default@127.0.0.1")


def test_records_may_be_complete_before_the_connector_is_asked() -> None:
    """As with the V2 model runner, which asks it when it has sampled."""
    copies = received(sent([rank(0, 4)]), [11, 12, 13])
    own = rank(0, 4)
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=TOKENS - 1,
        num_prompt_tokens=TOKENS,
    )  # fmt: skip
    sender, scheduled = scheduler(request), output()
    sender.connector.build_connector_meta(scheduled)
    connector = SimpleNamespace(build_connector_worker_meta=lambda: None)
    own.wrap(MethodPatches(), connector)
    own.follow(scheduled)
    own.end_forward()
    meta = connector.build_connector_worker_meta()
    assert connector.build_connector_worker_meta() is None, "once"
    given = SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=meta))
    sender.update_from_output(scheduled, given)
    assert received(sender._connector_finished(request)[1], [11, 12, 13]) == copies
    assert copies
    own.follow(scheduled)
    own.end_forward()
    own.follow(output())
    assert connector.build_connector_worker_meta() is None, "of the step that was followed last"


def _completed(own: TransferRecords, meta: Any) -> Any:
    """The forward's records are complete only after the connector was asked."""
    own.end_forward()
    return meta


def received(params: dict[str, Any], local: list[int], first: int = 0, heads: int = 4) -> dict[Any, Taken]:
    """What the decode engine's rank compares its blocks with; `first`: its first head."""
    request = SimpleNamespace(request_id="d", kv_transfer_params=params)
    remote = SimpleNamespace(host="127.0.0.1", engine_id="p", request_id="r")
    receive = SimpleNamespace(local_block_ids=(local,), remote=remote)
    scheduled = output()
    scheduled.kv_connector_metadata = SimpleNamespace(reqs_to_recv={"d": receive})
    scheduled.num_scheduled_tokens = {}
    scheduler(request).connector.build_connector_meta(scheduled)
    copies = Copies()
    own = rank(first, heads, copies)
    own.follow(scheduled)
    assert taken(copies) == {}, "the blocks still hold what lay there"
    own.arrived({"d", "other"}, ())
    return taken(copies)


def test_shares_of_two_ranks_make_up_what_one_receives() -> None:
    params = sent([rank(0, 2), rank(2, 2)])
    assert received(params, [11, 12, 13]) == {
        ("full", 11): copy(4, 16),
        ("full", 12): copy(4, 16),
        ("full", 13): copy(2, 8),
    }


def test_of_a_cached_prefix_nothing_is_received() -> None:
    params = sent([rank(0, 4)])
    assert received(params, [12, 13]) == {
        ("full", 12): copy(4, 16),
        ("full", 13): copy(2, 8),
    }


def test_a_rank_takes_the_shares_of_its_own_heads() -> None:
    params = sent([rank(0, 2), rank(2, 2)])
    assert received(params, [13], first=2, heads=2) == {("full", 13): copy(2, 4)}
    assert received(sent([rank(0, 4)]), [13], first=2, heads=2)["full", 13].folds == ()


def test_a_rank_that_holds_some_of_the_heads_takes_its_share_of_them() -> None:
    """Once a decode engine's ranks have said how many of them read from one."""
    sender = rank(0, 4)
    sender.readers.note(2)
    sender.readers.close()
    params = sent([sender])
    for first in (0, 2):
        assert received(params, [12, 13], first, heads=2) == {
            ("full", 12): copy(4, 8),
            ("full", 13): copy(2, 4),
        }
    assert received(params, [13]) == {("full", 13): copy(2, 8)}, "and one that holds all"
    assert received(params, [13], first=0, heads=1)["full", 13].folds == ()


def test_a_state_is_sent_whole_wherever_the_prompt_ends() -> None:
    """It lies in one block, with one slot; each rank has a part of its own."""
    asked = list[Any]()

    def block_folds(group: str, slots: torch.Tensor, **how: Any) -> torch.Tensor:
        asked.append((slots.tolist(), how))
        return torch.tensor([[1, 5, -5]])

    def states(rank: int, copies: Copies) -> tuple[TransferRecords, Any]:
        source = SimpleNamespace(
            layer=0, part=0, head_start=rank, num_heads=1, head_bytes=64, tensor=torch.zeros(1)
        )
        view = SimpleNamespace(name="state", sources=[source])
        group: Any = SimpleNamespace(number=1, block_slots=1, view=view, states=True)
        observer: Any = SimpleNamespace(block_folds=block_folds, record_format=lambda _: 7)
        return TransferRecords([group], copies, observer), group

    sender, group = states(1, Copies())
    folds = sender.folds(group, Sent("r", ([3, 5, 8], [0, 0, 6]), TOKENS))
    assert asked == [([[6]], {"baselines": True, "shares": ()})]
    assert folds is not None
    ((share, by_block),) = sender.shares(group, folds)
    assert by_block == {6: (5, -5)}
    sent = msgspec.structs.replace(share, folds=list(by_block.values()))
    for own, known in ((1, ((5, -5),)), (0, ())):
        receiver, _ = states(own, copies := Copies())
        receiver.expect(Expected("d", ([], [14]), "p", SentRecords("p", "r", TOKENS, [{"state": sent}])))
        assert taken(copies) == {("state", 14): Taken(1, known, "p")}


def test_a_prompt_that_was_computed_again_elsewhere_is_sent_as_it_lies_now() -> None:
    """After a preemption; what was found of its first blocks says nothing of those it has now."""
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=0,
        num_prompt_tokens=TOKENS,
    )  # fmt: skip
    own, ranks = scheduler(request), [rank(0, 2), rank(2, 2)]
    own.kv_cache_manager.get_block_ids = lambda _: ([1, 2, 4],)
    step(own, ranks, TOKENS)
    own.kv_cache_manager.get_block_ids = lambda _: ([3, 5, 8],)
    step(own, ranks, TOKENS)
    assert received(own._connector_finished(request)[1], [13]) == {("full", 13): copy(2, 8)}


def test_a_prompt_that_has_ended_is_not_taken_again_with_each_token() -> None:
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=TOKENS,
        num_prompt_tokens=TOKENS,
    )  # fmt: skip
    scheduled = output()
    scheduler(request).connector.build_connector_meta(scheduled)
    assert not hasattr(scheduled, SENT_ATTRIBUTE)


def test_before_a_prompt_has_ended_nothing_is_sent() -> None:
    own = rank(0, 4)
    connector = SimpleNamespace(build_connector_worker_meta=lambda: "the connector's")
    own.wrap(MethodPatches(), connector)
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=TOKENS - 2,
        num_prompt_tokens=TOKENS,
    )  # fmt: skip
    scheduled = output()
    scheduler(request).connector.build_connector_meta(scheduled)
    own.follow(scheduled)
    assert connector.build_connector_worker_meta() == "the connector's"


def test_a_request_that_ended_leaves_nothing_behind() -> None:
    own = rank(0, 4, copies := Copies())
    own._expected["d"] = SimpleNamespace()  # type: ignore[assignment]
    ended = output()
    ended.finished_req_ids = {"d"}
    own.follow(ended)
    own.arrived({"d"}, ())
    assert taken(copies) == {}


@pytest.mark.parametrize("text", [None, "forged"])
def test_of_what_cannot_be_believed_only_the_host_is_known(text: str | None) -> None:
    assert received({PARAMETER: text} if text else {}, [11, 12]) == {
        ("full", 11): Taken(4, (), "127.0.0.1"),
        ("full", 12): Taken(4, (), "127.0.0.1"),
    }


def test_of_a_receive_that_failed_nothing_is_kept() -> None:
    copies = Copies()
    own = rank(0, 4, copies)
    scheduled = output()
    setattr(scheduled, EXPECTED_ATTRIBUTE, (Expected("d", ([11],), "127.0.0.1", None),))
    own.follow(scheduled)
    own.arrived({"d"}, {"d"})
    own.arrived({"d"}, ())
    assert taken(copies) == {}


def test_records_that_do_not_reach_the_host_cost_the_engine_nothing() -> None:
    own, faults = rank(0, 4), list[str]()
    own._observer.fault = lambda part, error: faults.append(part)  # type: ignore[method-assign]
    own._found = lambda pending: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert PARAMETER not in sent([own])
    assert faults == ["announce"]

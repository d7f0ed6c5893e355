"""Records in a Mooncake worker's answers; with Mooncake itself: real/test_mooncake.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from canary_obs.copy_records.sent_records import Seals
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.mooncake_records import MooncakeRecords
from canary_obs.engines.vllm.sent_blocks import SENT_ATTRIBUTE, Sent
from canary_obs.engines.vllm.sent_copies import Copies
from tests.engines.vllm.taken_copies import Taken, taken
from tests.engines.vllm.test_received_blocks import TOKENS, copy, rank


class Answer(msgspec.Struct):
    """What a decode worker reads of an answer without the canary."""

    ok_reqs: list[str] | None = None


class MooncakeConnectorMetadata(SimpleNamespace):
    """Of one step."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**({"reqs_to_send": {}, "reqs_not_processed": set(), "reqs_to_recv": {}} | more))


class Worker:
    """The part of Mooncake's that is wrapped."""

    def __init__(self) -> None:
        self.reqs_need_send: dict[str, Any] = {"t": None}
        self._xfer_resp_decoder = msgspec.msgpack.Decoder(Answer)

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: Any) -> None:
        del self.reqs_need_send["t"]
        await sock.send_multipart((identity, msgspec.msgpack.encode(Answer(list(meta.req_blocks)))))


class Side:
    """A worker of either role, and what is known of its transfers."""

    def __init__(self, first: int, heads: int) -> None:
        self.copies, self.readers = Copies(), 1
        self.transfers, self.worker = rank(first, heads, self.copies), Worker()
        groups: Any = self.transfers._groups
        self.records = MooncakeRecords(groups, self.transfers, self.transfers._observer, Seals(None), "i")
        config = SimpleNamespace(transfer_group_ids=(0,))
        self.connector = SimpleNamespace(connector_worker=self.worker, engine_id="p", _kv_cache_config=config)
        assert self.records.wrap(MethodPatches(), self.connector)

    def step(self, sent: tuple[Sent, ...] = (), **metadata: Any) -> None:
        output = SimpleNamespace(
            finished_req_ids=set(), kv_connector_metadata=MooncakeConnectorMetadata(**metadata)
        )
        setattr(output, SENT_ATTRIBUTE, sent)
        self.records.follow(output)
        self.records.end_forward()

    def prefill(self, transfer: str = "t") -> None:
        """A prompt in blocks 3, 5 and 8, which are then to be sent."""
        self.step((Sent("r", ([3, 5, 8],), TOKENS, transfer),))
        self.step(reqs_to_send={"r": (transfer, [[3, 5, 8]])})

    def answer(self, transfer: str = "t") -> bytes:
        """What the decode worker gets."""
        answers = list[bytes]()

        async def send_multipart(parts: Any) -> None:
            answers.append(parts[-1])

        meta = SimpleNamespace(req_blocks={"d": (transfer, [[1]])}, remote_tp_size=self.readers)
        sock = SimpleNamespace(send_multipart=send_multipart)
        asyncio.run(self.worker.send_kv_to_decode(b"", sock, meta))  # type: ignore[arg-type]
        return answers[0]

    def receive(self, answers: list[bytes], local: list[int], transfer: str = "t") -> dict[Any, Taken]:
        """What this worker compares its blocks with when they have arrived."""
        pull = SimpleNamespace(
            local_block_ids=[local], transfer_id=transfer, remote_engine_id="p",
            remote_bootstrap_addr="http://127.0.0.1:1",
        )  # fmt: skip
        self.step(reqs_to_recv={"p": {"d": pull}})
        for data in answers:
            assert self.worker._xfer_resp_decoder.decode(data) == Answer(["d"])
        assert taken(self.copies) == {}, "the blocks still hold what lay there"
        self.records.arrived({"d"}, ())
        return taken(self.copies)


def sender(first: int = 0, heads: int = 4) -> Side:
    made = Side(first, heads)
    made.prefill()
    return made


def known(copies: dict[Any, Taken]) -> dict[int, Any]:
    return {block: sent._replace(peer="default@127.0.0.1") for (_, block), sent in copies.items()}


def test_records_come_with_the_answer() -> None:
    copies = Side(0, 4).receive([sender().answer()], [11, 12, 13])
    assert known(copies) == {11: copy(4, 16), 12: copy(4, 16), 13: copy(2, 8)}
    assert {sent.peer for sent in copies.values()} == {"i@127.0.0.1"}


def test_of_a_cached_prefix_nothing_is_received() -> None:
    assert known(Side(0, 4).receive([sender().answer()], [13])) == {13: copy(2, 8)}


def test_answers_of_two_ranks_make_up_what_one_receives() -> None:
    answers = [sender(0, 2).answer(), sender(2, 2).answer()]
    assert known(Side(0, 4).receive(answers, [13])) == {13: copy(2, 8)}
    assert Side(0, 4).receive(answers[:1], [13])["full", 13].folds == ()


def test_a_rank_that_holds_some_of_the_heads_takes_its_share_of_them() -> None:
    """From the second prompt on: with the first one's transfer a decode worker says how many they are."""
    own = sender()
    own.readers = 2
    assert Side(2, 2).receive([own.answer()], [13])["full", 13].folds == ()
    own.transfers.readers.close()
    own.worker.reqs_need_send["t"] = None
    own.prefill()
    answer = own.answer()
    for first in (0, 2):
        assert known(Side(first, 2).receive([answer], [13])) == {13: copy(2, 4)}


def test_a_decode_engine_of_as_many_ranks_is_sent_whole_records() -> None:
    own = sender()
    own.records._ranks = own.readers = 2
    own.answer()
    own.transfers.readers.close()
    assert own.transfers.readers.shares == {}


def test_records_of_another_transfer_are_not_believed() -> None:
    assert Side(0, 4).receive([sender().answer()], [13], "another")["full", 13].folds == ()


def test_an_answer_without_records_is_read_as_before() -> None:
    silent = Side(0, 4)
    silent.prefill("another")
    data = silent.answer()
    assert msgspec.msgpack.decode(data) == {"ok_reqs": ["d"]}
    assert Side(0, 4).receive([data], [13])["full", 13].folds == ()


def test_a_prompt_that_was_not_handed_over_yet_has_no_records() -> None:
    """Its blocks are not known before; they may still be others."""
    early = Side(0, 4)
    early.step((Sent("r", ([3, 5, 8],), TOKENS, "t"),))
    assert msgspec.msgpack.decode(early.answer()) == {"ok_reqs": ["d"]}


def test_of_a_receive_that_failed_nothing_is_kept() -> None:
    own = Side(0, 4)
    pull = SimpleNamespace(
        local_block_ids=[[13]], transfer_id="t", remote_engine_id="p", remote_bootstrap_addr="http://h:1"
    )
    own.step(reqs_to_recv={"p": {"d": pull}})
    own.records.arrived({"d"}, {"d"})
    own.records.arrived({"d"}, ())
    assert taken(own.copies) == {}


def test_records_are_kept_until_nothing_is_sent_any_more() -> None:
    own = sender()
    own.records.left({"r"})
    assert own.records._sending, "reported, and still to be sent: a sender that gave up too early"
    own.answer()
    own.records.left({"another"})
    assert own.records._sending
    own.records.left({"r"})
    assert not own.records._sending


def test_a_prompt_that_is_not_sent_leaves_nothing_behind() -> None:
    own = sender()
    own.step(reqs_not_processed={"t"})
    assert not own.records._sending


def test_prompts_of_other_connectors_are_not_followed() -> None:
    own = Side(0, 4)
    own.step((Sent("r", ([3, 5, 8],), TOKENS),))
    assert not own.records._sending
    own.transfers.by_transfer = True
    output: Any = SimpleNamespace(finished_req_ids=set())
    setattr(output, SENT_ATTRIBUTE, (Sent("r", ([3],), 1), Sent("s", ([5],), 1, "t")))
    own.transfers.follow(output)
    assert [each.request for each in own.transfers._sent] == ["r"]


@pytest.mark.parametrize("missing", ["reqs_need_send", "_xfer_resp_decoder"])
def test_a_version_without_what_is_needed_is_left_alone(missing: str) -> None:
    own = Side(0, 4)
    delattr(own.worker, missing)
    before = dict(vars(own.worker))
    assert not own.records.wrap(MethodPatches(), own.connector)
    assert vars(own.worker) == before


def test_a_fault_of_the_records_leaves_the_answer_as_it_is() -> None:
    own, faults = sender(), list[str]()
    own.transfers._observer.fault = lambda part, error: faults.append(part)  # type: ignore[method-assign]
    own.records._sending["t"] = own.records._sending["t"]._replace(folds=None)  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(own.answer()) == {"ok_reqs": ["d"]}
    assert faults == ["announce"]

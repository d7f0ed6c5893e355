"""Mooncake between two vLLM engines: what is received is compared with the records that came along."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.pair import LENGTH, Pair, check_shares
from tests.engines.vllm.real.prefill import ACCELERATOR, MOONCAKE, Prefill, as_for_transfers, settings
from tests.engines.vllm.real.ranks import RanksRig

DATA, LOST = (Phase.HEAD, Reason.KV_DATA), (Phase.HEAD, Reason.LOST_LOAD)
_TRANSFERS = count()


@pytest.fixture(scope="module")
def pair(models: Callable[[str], Path]) -> Iterator[Pair]:
    try:
        ctypes.CDLL("libibverbs.so.1")  # Mooncake's transfer engine is linked with it, also for TCP
    except OSError:
        assert not os.environ.get("CANARY_CI"), "libibverbs1 must not be missing in CI"
        pytest.skip("libibverbs.so.1 (libibverbs1) is missing")
    with pytest.MonkeyPatch.context() as patch, as_for_transfers(patch):
        patch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(free_port()))
        patch.setattr("torch.accelerator.current_device_index", lambda: 0)  # a CPU build has no answer
        made = Pair(models("llama"), MOONCAKE)
        yield made
        made.close()


def served(pair: Pair, change: Callable[[dict[str, Any]], None] = lambda _: None, **how: Any) -> set[Any]:
    """Serve a prompt by both engines; what was found."""
    return pair.served(change, transfer=f"transfer-{next(_TRANSFERS)}", **how)


def test_what_was_sent_is_what_is_received(pair: Pair) -> None:
    assert served(pair) == set()
    assert pair.loads() == (LENGTH, 0)
    assert pair.rig.canary.verdict() == (State.OK, ())
    answer = pair.answer
    pair.rig.fresh()  # nothing that was received is left
    assert pair.rig.generate([pair.asked], 6) == [answer]


def test_damage_at_the_sender_is_found_at_the_receiver(pair: Pair) -> None:
    assert served(pair, flip=True) == {DATA}
    assert {violation.peer for violation in pair.rig.found} == {"default@127.0.0.1"}


@pytest.mark.parametrize(
    ("fault", "found"), [("skip", LOST), ("order", DATA), ("block", DATA), ("layer", DATA)]
)
def test_bytes_of_elsewhere_or_none_are_found(pair: Pair, fault: str, found: Any) -> None:
    """Nothing moved; two blocks were exchanged; the bytes, or one layer's, are those of others' blocks."""
    served(pair)
    assert served(pair, send=fault) == {found}


def test_a_sender_that_gave_up_waiting_and_used_the_blocks_again_is_found(pair: Pair) -> None:
    """Its time-out frees what is still to be sent, and nobody says that the bytes are others' by now."""
    prompt = pair.prompt()
    params = pair.prefill.ask(prompt, transfer="stale")

    def others(number: int) -> list[int]:
        asked = pair.prefill.ask(pair.prompt(), transfer=f"other-{number}", expire=True)
        return list(asked["blocks"])

    pair.use_again(params["blocks"], others)
    pair.rig.fresh()
    pair.decode(params, prompt)
    pair.rig.settle()
    assert set(pair.rig.reasons()) == {DATA}


def test_a_receive_that_lands_when_its_blocks_were_freed_is_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    rig, prompt = pair.rig, pair.prompt()
    rig.fresh()
    ended = threading.Event()
    worker = get_kv_transfer_group().connector_worker
    monkeypatch.setattr(worker, "process_pulling_result", lambda response, pulls: ended.set())
    params = pair.prefill.ask(prompt, transfer="late", send="late")
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    rig.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling)
    rig.step(3)
    pair.give_away_received()
    assert rig.settle() == []
    pair.prefill.ask([])
    assert ended.wait(60)
    assert {violation.reason for violation in rig.settle()} == {Reason.KV_DATA}
    rig.finish()


class Altered:
    """Changes the prefill worker's answers before they are read."""

    def __init__(self, reader: Any, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        self.reader, self.change, self.seen = reader, change, list[str]()

    def decode(self, data: bytes) -> Any:
        said = msgspec.msgpack.decode(data)
        self.seen += said["kv_canary"].values()
        return self.reader.decode(
            msgspec.msgpack.encode(said | {"kv_canary": self.change(said["kv_canary"])})
        )


@pytest.mark.parametrize("way", ["lost", "forged", "stale"])
def test_records_that_cannot_be_believed_leave_a_receive_unverified(
    pair: Pair, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().connector_worker

    def change(came: dict[str, str]) -> dict[str, str]:
        if way == "lost":
            return {}
        if way == "forged":
            (name, text), *_ = came.items()
            return {name: text[:-8] + ("A" * 8 if text[-8:] != "A" * 8 else "B" * 8)}
        return dict.fromkeys(came, altered.seen[0])  # of the transfer before

    altered = Altered(worker._xfer_resp_decoder, change)
    monkeypatch.setattr(worker, "_xfer_resp_decoder", altered)
    served(pair)
    assert served(pair) == set()
    assert len(altered.seen) == 2
    assert pair.loads() == (0, LENGTH)
    monkeypatch.undo()
    assert served(pair) == set()
    assert pair.loads() == (LENGTH, 0)


def test_a_clean_storm_is_compared_and_answers_the_same(pair: Pair) -> None:
    compared, left_out = pair.storm(lambda: {"transfer": f"transfer-{next(_TRANSFERS)}"})
    assert compared > 1000
    assert left_out == 0


@pytest.fixture
def two_ranks(pair: Pair) -> Iterator[Pair]:
    """The decode engine, and a prefill engine of two ranks."""
    one = pair.prefill
    pair.prefill = Prefill(pair.model, free_port(), tensor_parallel=2, connector=MOONCAKE)
    yield pair
    pair.prefill.close()
    pair.prefill = one


@pytest.mark.nightly
def test_what_two_ranks_send_is_what_one_receives(two_ranks: Pair) -> None:
    """Each has half of the heads, and answers for itself; the folds of both sum to what lies here."""
    for _ in range(3):
        assert served(two_ranks) == set()
        assert two_ranks.loads() == (LENGTH, 0)
        answer = two_ranks.answer
        two_ranks.rig.fresh()
        assert two_ranks.rig.generate([two_ranks.asked], 6) == [answer]
    assert served(two_ranks, flip=True, rank=1) == {DATA}
    assert served(two_ranks, send="order", rank=1) == {DATA}
    assert served(two_ranks, send="skip", rank=1) == {DATA}
    assert served(two_ranks) == set()
    assert two_ranks.loads() == (LENGTH, 0)


@pytest.fixture
def to_two(pair: Pair) -> Iterator[RanksRig]:
    """A decode engine of two ranks, for the prefill engine of one."""
    own = settings("kv_consumer", 60, 2, MOONCAKE)
    made = RanksRig(pair.model, **own, worker_extension_cls=f"{ACCELERATOR}.OfWorkers")
    yield made
    made.close()


def test_each_of_two_ranks_receives_its_share_of_what_one_sends(pair: Pair, to_two: RanksRig) -> None:
    found = check_shares(pair, to_two, lambda: {"transfer": f"two-{next(_TRANSFERS)}"})
    for compared, left_out, reasons in found(send="skip"):
        assert (compared, left_out) == (LENGTH, 0)
        # Of blocks that nobody has used before it is not known what lay there.
        assert "head lost_load" in reasons
        assert set(reasons) <= {"head lost_load", "head kv_data"}
    assert found(send="order") == [(LENGTH, 0, ["head kv_data"])] * 2

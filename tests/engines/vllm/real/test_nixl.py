"""NIXL between two vLLM engines: what is received is compared with the records that came along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canary_obs.engines.toolkit.service_process import free_port
from canary_obs.engines.vllm.offload_keys import connectors_named
from canary_obs.runtime.device.byte_address import locate_byte
from canary_obs.vocabulary import Phase, Reason, State
from tests.engines.vllm.real.pair import LENGTH, Pair
from tests.engines.vllm.real.prefill import MULTI, NIXL, Prefill, as_for_transfers, is_v2
from tests.engines.vllm.real.rig import prompts
from tests.engines.vllm.real.test_left_out import STATES

DATA, LOST = (Phase.HEAD, Reason.KV_DATA), (Phase.HEAD, Reason.LOST_LOAD)


@pytest.fixture(scope="module")
def running() -> Iterator[list[Pair]]:
    """Pairs that run: one at a time."""
    with pytest.MonkeyPatch.context() as patch, as_for_transfers(patch):
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        made: list[Pair] = []
        yield made
        for each in made:
            each.close()


@pytest.fixture(scope="module")
def pair(models: Callable[[str], Path], running: list[Pair]) -> Pair:
    running.append(Pair(models("llama")))
    return running[-1]


def test_what_was_sent_is_what_is_received(pair: Pair) -> None:
    assert pair.served() == set()
    assert pair.loads() == (LENGTH, 0)
    assert pair.rig.canary.verdict() == (State.OK, ())
    answer = pair.answer
    pair.rig.fresh()  # nothing that was received is left
    assert pair.rig.generate([pair.asked], 6) == [answer]


def test_damage_at_the_sender_is_found_at_the_receiver(pair: Pair) -> None:
    assert pair.served(flip=True) == {DATA}
    assert {violation.peer for violation in pair.rig.found} == {"default@127.0.0.1"}


def test_a_transfer_that_moved_nothing_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    wrapper = get_kv_transfer_group().connector_worker.nixl_wrapper
    skipped = set()

    def transfer(handle: Any) -> str:
        skipped.add(handle)
        return "DONE"

    given = wrapper.check_xfer_state, wrapper.get_xfer_telemetry
    done = type("Telemetry", (), {"xferDuration": 0, "postDuration": 0, "totalBytes": 0, "descCount": 0})
    monkeypatch.setattr(wrapper, "transfer", transfer)
    monkeypatch.setattr(
        wrapper, "check_xfer_state", lambda handle: "DONE" if handle in skipped else given[0](handle)
    )
    monkeypatch.setattr(
        wrapper, "get_xfer_telemetry", lambda handle: done() if handle in skipped else given[1](handle)
    )
    assert pair.served() == {LOST}


def _exchange(params: dict[str, Any]) -> None:
    blocks = params["remote_block_ids"][0]
    blocks[0], blocks[1] = blocks[1], blocks[0]


def test_blocks_of_other_places_are_found(pair: Pair) -> None:
    assert pair.served(_exchange) == {DATA}


def test_blocks_of_another_request_are_found(pair: Pair) -> None:
    """The reference that a router passes is stale: the producer has reused the blocks."""
    other = pair.prefill.ask(pair.prompt())

    def stale(params: dict[str, Any]) -> None:
        params["remote_block_ids"] = other["remote_block_ids"]

    assert pair.served(stale) == {DATA}


def test_a_layer_of_other_blocks_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last region of each remote block is read seven blocks before it: the KV of another request."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    wrapper = get_kv_transfer_group().connector_worker.nixl_wrapper
    make, blocks = wrapper.make_prepped_xfer, 90

    def moved(kind: str, local: Any, own: Any, remote: Any, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = np.array(theirs)
        last = theirs // blocks == theirs.max() // blocks
        assert 0 < last.sum() < len(theirs)
        theirs[last] -= 7
        return make(kind, local, own, remote, theirs, *args, **kwargs)

    pair.served()
    monkeypatch.setattr(wrapper, "make_prepped_xfer", moved)
    assert pair.served() == {DATA}


def test_a_sender_that_gave_up_waiting_and_used_the_blocks_again_is_found(pair: Pair) -> None:
    """Its time-out has passed when the decode engine reads: nobody says that the bytes are others' by now."""
    prompt = pair.prompt()
    params = pair.prefill.ask(prompt)

    def others(_: int) -> list[int]:
        return list(pair.prefill.ask(pair.prompt(), expire=True)["remote_block_ids"][0])

    pair.use_again(params["remote_block_ids"][0], others)
    pair.rig.fresh()
    pair.decode(params, prompt)
    pair.rig.settle()
    assert set(pair.rig.reasons()) == {DATA}


def _land_late(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> set[Reason]:
    """What is found of a receive whose request was aborted, and whose blocks others fill as it lands."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    rig = pair.rig
    rig.fresh()
    (nixl,) = connectors_named(get_kv_transfer_group(), ("NixlPullConnector",))
    worker = nixl.connector_worker
    wrapper, late = worker.nixl_wrapper, []
    start, state = wrapper.transfer, wrapper.check_xfer_state
    monkeypatch.setattr(wrapper, "transfer", lambda handle: late.append(handle) or "PROC")
    monkeypatch.setattr(wrapper, "check_xfer_state", lambda handle: "PROC")
    prompt = pair.prompt()
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": pair.prefill.ask(prompt)})
    rig.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling)
    for _ in range(200):
        rig.step()
        if late:
            break
    assert late
    worker._recving_transfers.clear()
    worker._recving_metadata.clear()
    pair.give_away_received()
    assert rig.settle() == []
    for handle in late:
        given = start(handle)
        while given == "PROC":
            given = state(handle)
        assert given == "DONE"
    found = {violation.reason for violation in rig.settle()}
    monkeypatch.undo()
    rig.finish()
    return found


def test_a_receive_that_lands_when_its_blocks_were_freed_is_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _land_late(pair, monkeypatch) == {Reason.KV_DATA}


@pytest.mark.parametrize("way", ["lost", "forged", "another"])
def test_records_that_cannot_be_believed_leave_a_receive_unverified(pair: Pair, way: str) -> None:
    other = pair.prefill.ask(pair.prompt())

    def change(params: dict[str, Any]) -> None:
        if way == "lost":
            del params["kv_canary"]
        elif way == "forged":
            text = params["kv_canary"]
            params["kv_canary"] = text[:-8] + ("A" * 8 if text[-8:] != "A" * 8 else "B" * 8)
        else:
            params["kv_canary"] = other["kv_canary"]

    assert pair.served(change) == set()
    assert pair.loads() == (0, LENGTH)


def test_a_clean_storm_is_compared_and_answers_the_same(pair: Pair) -> None:
    compared, left_out = pair.storm()
    assert compared > 1000
    assert left_out == 0


@pytest.fixture(scope="module")
def multi(models: Callable[[str], Path], running: list[Pair]) -> Pair:
    """Both engines with an OffloadingConnector beside NIXL, in a MultiConnector; the others end."""
    while running:
        running.pop().close()
    running.append(Pair(models("llama"), MULTI))
    return running[-1]


def test_a_clean_storm_through_both_of_a_multi_connector(multi: Pair) -> None:
    compared, left_out = multi.storm()
    assert compared > 1000
    assert left_out == 0


def test_what_each_connector_of_a_multi_connector_loads_is_compared(multi: Pair) -> None:
    for _ in range(2):
        assert multi.served() == set()
        assert multi.loads() == (LENGTH, 0)
        assert multi.rig.canary.verdict() == (State.OK, ())
    answer = multi.answer
    multi.rig.generate(prompts(2, seed=4, shared=0), 2)  # stores are submitted a step later
    multi.rig.fresh()
    assert multi.rig.generate([multi.asked], 6) == [answer]
    assert multi.loads() == (LENGTH // 32 * 32, 0), "from its own memory tier"
    assert multi.rig.settle() == []
    assert multi.served(flip=True) == {DATA}
    assert multi.served(lambda params: params.pop("kv_canary")) == set()
    assert multi.loads() == (0, LENGTH)


def test_a_receive_in_a_multi_connector_that_lands_when_its_blocks_were_freed_is_found(
    multi: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _land_late(multi, monkeypatch) == {Reason.KV_DATA}


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The decode engine, and a prefill engine of two ranks: within a MultiConnector on V1, alone on V2."""
    name, connector = ("pair", NIXL) if is_v2() else ("multi", MULTI)
    pair: Pair = request.getfixturevalue(name)
    one, pair.prefill = pair.prefill, Prefill(pair.model, free_port(), 2, connector)
    yield pair
    two, pair.prefill = pair.prefill, one
    two.close()


@pytest.mark.timeout(600)  # to start two ranks takes minutes where others use the cores
def test_what_two_ranks_send_is_what_one_receives(two_ranks: Pair) -> None:
    """Each has half of the heads; the folds of both sum to what lies here."""
    assert two_ranks.served() == set()
    assert two_ranks.loads() == (LENGTH, 0)
    answer = two_ranks.answer
    two_ranks.rig.fresh()
    assert two_ranks.rig.generate([two_ranks.asked], 6) == [answer]
    assert two_ranks.served(_exchange) == {DATA}
    assert two_ranks.served(lambda params: params.pop("kv_canary")) == set()
    assert two_ranks.loads() == (0, LENGTH)


def test_who_loads_what_was_computed_from_damage_is_listed(multi: Pair) -> None:
    """A prompt is prolonged from damage, another one beside it; both come back from the memory tier."""
    rig, more = multi.rig, [5] * 64
    stored_in = rig.adapter.copies_stored_in()
    assert stored_in is not None
    assert (stored_in.place, stored_in.shown) == ("OffloadingConnector", True)
    rig.fresh()
    prompt, apart = multi.prompt()[:100], multi.prompt()[:100]
    rig.generate([prompt], 2)
    with rig.adapter.hooks.lock:
        view, cached = rig.canary.state.groups[0].view, rig.adapter.prefix_cache
        damaged = int(cached.cached(view.name, unlocked_only=False).slots[0])
        locate_byte(view.sources[0], damaged, 3).flip(64)
    rig.generate([prompt + more, apart + more], 2)
    assert {row.slot for row in rig.settle()} == {damaged}
    (taint,) = rig.canary.taint.tracker.damages.values()
    before = set(taint.readings)
    names = rig.canary.taint.tracker.readers.lives.names
    assert taint.cause is None
    for seed in (4, 5):  # stores are submitted a step later; others take the blocks
        rig.generate(prompts(8, seed=seed), 2)
        assert rig.llm.reset_prefix_cache()
    multi.loads()
    rig.generate([apart + more + [6]], 2)
    assert multi.loads() == (5 * 32, 0)
    assert set(taint.readings) == before, "what was computed beside it is loaded by somebody else"
    rig.generate([prompt + more + [6]], 2)
    assert multi.loads() == (5 * 32, 0)
    (loader,) = set(taint.readings) - before
    assert (taint.readings[loader].derived, loader) == (True, len(names) - 1)
    rig.generate([prompt + more + [7]], 2)
    assert multi.loads() == (0, 0), "it joins the loaded blocks"
    assert set(taint.readings) - before == {loader, len(names) - 1}
    assert taint.cause is None


@pytest.fixture(scope="module")
def with_states(models: Callable[[str], Path], running: list[Pair]) -> Pair:
    """Both engines keep states beside KV; the others end."""
    while running:
        running.pop().close()
    running.append(Pair(models("falcon_h1"), **STATES))
    return running[-1]


def test_a_state_is_compared_with_what_was_sent(with_states: Pair) -> None:
    """The prefill engine leaves the last token of the prompt to the other one."""
    pair = with_states
    for _ in range(2):
        assert pair.served() == set()
        assert pair.loads_by_group() == {"full": (LENGTH - 1, 0), "state": (1, 0)}
    assert pair.rig.canary.verdict() == (State.OK, ())
    answer = pair.answer
    pair.rig.fresh()
    assert pair.rig.generate([pair.asked], 6) == [answer]
    other = pair.prefill.ask(pair.prompt())

    def stale(params: dict[str, Any]) -> None:
        params["remote_block_ids"][1] = other["remote_block_ids"][1]

    for change, how in ((stale, {}), (lambda _: None, {"flip_state": True})):
        assert pair.served(change, **how) == {DATA}
        assert {violation.group for violation in pair.rig.found} == {"state"}
    assert pair.served(lambda params: params.pop("kv_canary")) == set()
    assert pair.loads_by_group() == {"full": (0, LENGTH - 1), "state": (0, 1)}

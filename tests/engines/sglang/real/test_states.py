"""Most layers of this model keep a state per request: full layers and states are protected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang import adapter
from canary_obs.engines.sglang.scheduler_canary import attach_to_scheduler
from canary_obs.engines.sglang.stream_hooks import StreamHooks
from canary_obs.vocabulary import Part, Phase, Reason, State
from tests.engines.sglang.real.perturbed import check_injections, inject_into
from tests.engines.sglang.real.rig import Rig
from tests.engines.sglang.real.traffic import prompts, storm
from tests.engines.vllm.real.forwards import without
from tests.unchecked import Report

_SMALL = {"max_total_tokens": 832, "max_mamba_cache_size": 32}
_BEFORE_IT_IS_READ = {Phase.HIT, Phase.HEAD}


def test_a_storm_over_full_layers_and_states(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses its overlap loop for these models on a CPU."""
    rig = make_rig("states", **_SMALL)
    told = announced(rig, monkeypatch)
    rig.run(storm(rig, rounds=1))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.state.coverage == 1.0
    assert {source.layer for source in rig.adapter.groups[0].sources} == {3}
    assert {source.layer for source in rig.adapter.groups[1].sources} == {0, 1, 2}
    for phase in (Phase.HEAD, Phase.TAIL):
        assert rig.counters().verified[phase] > 10_000
    assert rig.counters("state").verified[Phase.TAIL] > 300
    for group in ("full", "state"):
        assert rig.counters(group).verified[Phase.SWEEP]
    assert told == {"invalidated", "copied"}
    monkeypatch.setenv("KV_CANARY_MODE", "none")
    plain = make_rig("states", **_SMALL)
    plain.run(storm(plain, rounds=1))
    assert plain.answers == rig.answers


def test_a_storm_with_the_hooks_of_gpus(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "concurrent", lambda device: True)
    rig = make_rig("states", **_SMALL)
    assert isinstance(rig.adapter._hooks, StreamHooks)
    told = announced(rig, monkeypatch)
    rig.run(storm(rig, rounds=1))
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    assert rig.canary.state.coverage == 1.0
    for phase in (Phase.HEAD, Phase.TAIL):
        assert rig.counters().verified[phase] > 10_000
    assert rig.counters("state").verified[Phase.TAIL] > 300
    for group in ("full", "state"):
        assert rig.counters(group).verified[Phase.SWEEP]
    assert told == {"invalidated", "copied"}
    rig.generate(prompts(2), 40)
    assert rig.canary.checks.replays.replayed  # nothing has ended what launches them as one


@pytest.fixture
def sampling(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """One forward of four is shown with states, as where SGLang has buffers of its own for the prefix cache.

    It has none on a CPU, so a request's state becomes the cache's when the request ends, without a record.
    """
    monkeypatch.setattr(adapter, "concurrent", lambda device: True)
    rig: Rig = make_rig("states", **_SMALL)

    def leave(slots: torch.Tensor) -> None:
        rig.canary.before_load("state", slots)
        rig.canary.awaited("state", slots)

    states = rig.adapter._views.states
    assert states is not None
    states.every, states.leave, states.adoptions = 4, leave, lambda: rig.canary.adoptions
    return rig


def test_records_that_are_declared_unknown_while_states_are_not_shown(sampling: Rig) -> None:
    """The patrol takes baselines of what running requests have: the next forward is shown."""
    states = sampling.adapter._views.states
    assert states is not None
    adopted = list[int]()

    def script() -> Iterator[Iterable[Any]]:
        asked = [sampling.request(name, p, 60) for name, p in prompts(2).items()]
        for turn in sampling.until_done(asked):
            if len(adopted) < 5 and sampling.running() and states._since == 1:
                sampling.canary.state.adopt_all()
                adopted.append(states.left_out)
            if adopted:
                sampling.canary.check_everything()
            yield turn

    sampling.run(script())
    assert len(adopted) == 5
    assert sampling.settle() == []


def test_a_storm_in_which_some_forwards_are_shown_with_states(sampling: Rig) -> None:
    sampling.run(storm(sampling, rounds=1))
    assert sampling.settle() == []
    state, reasons = sampling.canary.verdict()
    assert state in (State.OK, State.DEGRADED), reasons
    assert not any("forward" in reason for reason in reasons)
    states = sampling.adapter._views.states
    assert states is not None
    assert states.left_out > 30
    assert sampling.counters("state").verified[Phase.TAIL] > 100


@pytest.mark.parametrize("shown", [True, False])
def test_a_state_changes_after_a_forward_that_was_shown_with_it(sampling: Rig, shown: bool) -> None:
    """And after one that was not: the next forward is built on it, and nobody knows better."""
    states = sampling.adapter._views.states
    assert states is not None
    slots = list[int]()

    def script() -> Iterator[Iterable[Any]]:
        asked = [sampling.request(name, p, 30) for name, p in prompts(2).items()]
        for turn in sampling.until_done(asked):
            if not slots and states.left_out > 3 and states.shown is shown and (now := sampling.running()):
                slots.append(int(now[0].kv.mamba_pool_idx))
                flip(sampling, Part.V, 2, slots[0])
            yield turn

    sampling.run(script())
    sampling.canary.delivery.drain(5.0)
    found = {(one.group, one.phase, one.reason, one.slot) for one in sampling.found}
    assert slots
    assert found == ({("state", Phase.HEAD, Reason.KV_DATA, slots[0])} if shown else set())


@pytest.mark.parametrize("since", [0, 1, 3])
def test_a_forward_that_nobody_saw_is_noticed_before_states_are_compared(
    sampling: Rig, monkeypatch: pytest.MonkeyPatch, since: int
) -> None:
    """It has changed them. On a GPU not every step looks whether all forwards were shown."""
    states = sampling.adapter._views.states
    assert states is not None
    monkeypatch.setattr(sampling.canary._scheduler, "step", lambda stream: None)
    unseen = list[int]()

    def script() -> Iterator[Iterable[Any]]:
        asked = [sampling.request(name, p, 60) for name, p in prompts(2).items()]
        for turn in sampling.until_done(asked):
            due = states.left_out > 4 + 4 * len(unseen) and states._since == since
            if len(unseen) < 3 and sampling.running() and due:
                unseen.append(states.left_out)
                with without(sampling.runner, "forward"):
                    yield turn
            else:
                yield turn

    sampling.run(script())
    sampling.canary.delivery.drain(5.0)
    assert len(unseen) == 3
    assert sampling.found == []


def test_states_that_are_never_shown_again_are_missed(
    sampling: Rig, monkeypatch: pytest.MonkeyPatch, unchecked: Report
) -> None:
    states = sampling.adapter._views.states
    assert states is not None
    keep = states.keep

    def stuck(*given: Any, **named: Any) -> None:
        if states._since == states.every - 1:  # the next forward is due to be shown
            states._since = 1
        keep(*given, **named)

    sampling.generate(prompts(2), 40)
    assert not any("forwards" in reason for reason in sampling.canary.verdict()[1])
    monkeypatch.setattr(states, "keep", stuck)
    started = time.monotonic()
    sampling.generate(prompts(2, 7), 60)
    sampling.settle()
    state, reasons = sampling.canary.verdict()
    seconds = time.monotonic() - started
    named = "forwards were not shown or not checked: state"
    unchecked("states are never shown again", "SGLang", (state.value, reasons), names=named, seconds=seconds)


def announced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What will have been announced of states."""
    found = set[str]()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(group: str, *slots: Any, **more: Any) -> Any:
            if group == "state" and slots[0].numel():
                found.add(name)
            return original(group, *slots, **more)

        return note

    for name in ("copied", "received", "invalidated"):
        monkeypatch.setattr(rig.canary, name, noting(name, getattr(rig.canary, name)))
    return found


@pytest.fixture(params=[False, True], ids=["as on a CPU", "with the hooks of GPUs"])
def rig(request: pytest.FixtureRequest, make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param:
        monkeypatch.setattr(adapter, "concurrent", lambda device: True)
    return make_rig("states", **_SMALL)


@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_full_layer_flips(rig: Rig, part: Part) -> None:
    rig.generate(prompts(2), 4)
    slot = int(rig.adapter.prefix_cache.cached("full", unlocked_only=True).slots[3])
    pool = rig.runner.token_to_kv_pool.full_kv_pool
    with torch.inference_mode():
        (pool.k_buffer if part is Part.K else pool.v_buffer)[0].view(torch.int32)[slot, 0, 0] ^= 1 << 9
    assert {(found.reason, found.slot) for found in rig.settle()} == {(Reason.KV_DATA, slot)}


def tensors(rig: Rig) -> dict[Part, torch.Tensor]:
    """[layers, slots, ...]: convolutions and recurrences."""
    held = rig.runner.req_to_token_pool.mamba_pool.mamba_cache
    return {Part.K: held.conv[0], Part.V: held.temporal}


def flip(rig: Rig, part: Part, layer: int, slot: int) -> None:
    with torch.inference_mode():
        state = tensors(rig)[part][layer, slot].view(-1)
        word = {2: torch.int16, 4: torch.int32}[state.element_size()]
        state[5:6].view(word)[0] ^= 1 << 9


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_bit_of_a_cached_state_flips(rig: Rig, part: Part, layer: int) -> None:
    rig.generate(prompts(2), 4)
    slot = int(rig.adapter.prefix_cache.cached("state", unlocked_only=True).slots[-1])
    flip(rig, part, layer, slot)
    found = rig.settle()
    assert {(one.group, one.reason, one.slot, one.part) for one in found} == {
        ("state", Reason.KV_DATA, slot, part)
    }
    assert {one.phase for one in found} == {Phase.PATROL, Phase.SWEEP}


def test_a_damaged_state_of_the_prefix_cache_is_found_by_whoever_joins_it(rig: Rig) -> None:
    """Its copy, which the request goes on with, is compared before the first forward reads it."""
    prompt = prompts(1)["r0.0"] * 3
    rig.generate({"first": prompt}, 4)
    slots = rig.adapter.prefix_cache.cached("state", unlocked_only=True).slots.tolist()
    for slot in slots:
        flip(rig, Part.V, 1, slot)
    rig.generate({"second": [*prompt, 5, 6, 7]}, 4)
    rig.canary.delivery.drain(5.0)
    early = [one for one in rig.found if one.phase in _BEFORE_IT_IS_READ and one.slot not in slots]
    assert {(one.group, one.reason, one.part) for one in early} == {("state", Reason.KV_DATA, Part.V)}


def while_decoding(rig: Rig, act: Callable[[list[Any]], None]) -> None:
    """`act` on two requests that decode, between two forwards."""

    def script() -> Iterator[Iterable[Any]]:
        done = False
        for turn in rig.until_done([rig.request(name, p, 30) for name, p in prompts(2).items()]):
            if not done and (requests := rig.running()):
                act(requests)
                done = True
            yield turn
        assert done

    rig.run(script())


def test_the_state_of_a_request_that_decodes_changes_between_forwards(rig: Rig) -> None:
    slots = list[int]()

    def change(requests: list[Any]) -> None:
        slots.append(int(requests[0].kv.mamba_pool_idx))
        flip(rig, Part.V, 2, slots[0])
        assert rig.adapter.holders("state", slots[0]) == (requests[0].rid,)

    while_decoding(rig, change)
    rig.canary.delivery.drain(5.0)
    assert {(one.group, one.phase, one.reason, one.slot) for one in rig.found} == {
        ("state", Phase.HEAD, Reason.KV_DATA, slots[0])
    }


def test_a_request_is_given_the_state_of_another_one(rig: Rig) -> None:
    """The rows that the model's layers read are exchanged; the scheduler's own view is not."""
    rows = rig.runner.req_to_token_pool.req_index_to_mamba_index_mapping

    def exchange(requests: list[Any]) -> None:
        own, other = (request.kv.req_pool_idx for request in requests[:2])
        kept = int(rows[own])
        rows[own] = rows[other]
        rows[other] = kept

    while_decoding(rig, exchange)
    rig.canary.delivery.drain(5.0)
    reasons = {(one.group, one.phase, one.reason) for one in rig.found}
    assert ("state", Phase.TAIL, Reason.WRITE_TOKEN) in reasons
    assert {group for group, _, _ in reasons} == {"state"}


def test_a_copy_to_a_new_request_goes_wrong(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of the source is not copied."""
    prompt = prompts(1)["r0.0"] * 3
    rig.generate({"first": prompt}, 4)
    pool = rig.runner.req_to_token_pool.mamba_pool
    copied = type(pool).copy_from

    def copy_from(given: Any, src_indices: Any, dst_indices: Any) -> None:
        kept = given.mamba_cache.temporal[1, dst_indices].clone()
        copied(given, src_indices, dst_indices)
        given.mamba_cache.temporal[1, dst_indices] = kept

    rig.close()
    monkeypatch.setattr(type(pool), "copy_from", copy_from)
    attach_to_scheduler(rig.scheduler, "again")
    rig.collect_from()
    rig.found.clear()
    rig.generate({"second": [*prompt, 5, 6, 7]}, 4)
    rig.canary.delivery.drain(5.0)
    early = {(one.group, one.reason) for one in rig.found if one.phase in _BEFORE_IT_IS_READ}
    assert early == {("state", Reason.KV_DATA)}


def test_all_modes_of_fault_injection_in_states(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_into("state", monkeypatch)
    rig = make_rig("states", **_SMALL)
    why, no_entries = (
        "the group's entries are not the tokens of the forward",
        "no request of the forward has a",
    )
    check_injections(rig, "state", why, no_entries=f"{no_entries} prefix in the group")

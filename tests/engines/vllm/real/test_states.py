"""States beside attention in a real hybrid model: clean, covered, and damage found where it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from canary_obs.engines.vllm.worker import attach_to_worker, detach_from_worker
from canary_obs.records import Violation
from canary_obs.vocabulary import HealPolicy, Part, Phase, Reason, State
from tests.engines.vllm.real.heals import counts
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.test_left_out import STATES, preempt_all, traffic
from tests.unchecked import Report

TENSORS = {Part.K: 0, Part.V: 1}  # convolution, recurrence


@pytest.fixture(scope="module")
def rig(models: Callable[[str], Any]) -> Iterator[Rig]:
    """States are shown in each forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_CANARY_STATE_INTERVAL", "1")
        made = Rig(models("falcon_h1"), **STATES)
        yield made
        made.close()


@pytest.fixture
def attached_again(rig: Rig) -> Iterator[None]:
    """The test attaches a canary of its own; afterwards the engine has one as before."""
    rig.fresh()
    detach_from_worker(rig.worker)
    yield
    rig.finish()
    rig.step()
    assert rig.llm.reset_prefix_cache()
    detach_from_worker(rig.worker)
    attach_to_worker(rig.worker)
    rig.collect_from()
    rig.found.clear()


def tensor(rig: Rig, layer: int, part: Part) -> torch.Tensor:
    """The states of a layer: [blocks, ...]."""
    (group,) = (group for group in rig.adapter.vllm_groups if group.states)
    context = rig.runner.compilation_config.static_forward_context
    found = context[group.layers[layer]].kv_cache[TENSORS[part]]
    assert isinstance(found, torch.Tensor)
    return found


def flip(state: torch.Tensor) -> None:
    word = {2: torch.int16, 4: torch.int32}[state.element_size()]
    flat = state.view(-1)[3:4].view(word)
    flat ^= 1 << (8 * state.element_size() - 14)  # the same bit of a bfloat16 and of a float32


def found_in(rig: Rig, blocks: set[int]) -> set[tuple[Phase, Reason]]:
    """How the damage was found; all of it in these states."""
    own: list[Violation] = rig.settle()
    assert {violation.group for violation in own} == {"state"}
    assert {violation.slot for violation in own} <= blocks
    return {(violation.phase, violation.reason) for violation in own}


@pytest.mark.parametrize("interval", ["1", "3", "16"])
def test_clean_through_hits_copies_preemption_reset_and_sleep(make_rig: Any, interval: str) -> None:
    rig = make_rig("falcon_h1", canary={"state_interval": interval}, **STATES)
    assert rig.canary.state.coverage == 1.0
    answers = traffic(rig)
    assert preempt_all(rig)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())
    rig.fresh()
    assert traffic(rig, 1) == answers[:4]
    rig.llm.sleep(level=1)
    rig.llm.wake_up()
    rig.collect_from()
    traffic(rig, 2)
    assert rig.settle() == []
    assert (rig.adapter.states.left_out > 0) == (interval != "1")
    plain = make_rig("falcon_h1", canary={"mode": "none"}, **STATES)
    assert traffic(plain) == answers


@pytest.fixture
def seldom(make_rig: Any) -> Rig:
    """States are shown in one of 16 forwards. Its tests come before those with `rig`, which it would end."""
    made: Rig = make_rig("falcon_h1", canary={"state_interval": "16"}, **STATES)
    made.fresh()
    return made


def left_out(rig: Rig, steps: int = 1) -> int:
    """Of so many steps, those whose forwards were not shown with states."""
    before = rig.adapter.states.left_out
    rig.step(steps)
    return int(rig.adapter.states.left_out - before)


def test_what_a_forward_left_is_compared_before_one_that_is_not_shown(seldom: Rig) -> None:
    rig = seldom
    (prompt,) = prompts(1, seed=8, shared=0)
    rig.start({"held": prompt}, 60)
    while left_out(rig):
        pass
    assert found_of(rig) == set()
    block = rig.blocks_of("held", 1)[-1]
    flip(tensor(rig, 0, Part.V)[block])
    assert left_out(rig) == 1
    assert found_of(rig) == {(Phase.HEAD, Reason.KV_DATA, block)}
    rig.found.clear()
    # Until the next one, whatever changes it in between is overwritten, and not looked for.
    flip(tensor(rig, 0, Part.V)[block])
    assert left_out(rig, 14) == 14
    assert left_out(rig) == 0
    assert found_of(rig) == set()
    rig.finish()


def test_a_state_for_the_prefix_cache_is_protected_by_a_forward_that_is_not_shown(seldom: Rig) -> None:
    rig = seldom
    rig.generate([[5, 6, 7, 8]], 2)  # the forward that is shown
    before = rig.adapter.states.left_out
    rig.generate([list(range(10, 230))], 4)  # its 128th token fills a block
    assert rig.adapter.states.left_out == before + 2 + 3
    (block,) = rig.idle_blocks(group=1)
    assert rig.settle() == []
    flip(tensor(rig, 1, Part.K)[block])
    assert {row.slot for row in rig.settle() if row.phase is Phase.SWEEP} == {block}


def test_who_computes_from_a_damaged_state_is_listed_where_it_is_not_shown(seldom: Rig) -> None:
    rig = seldom
    first, second = prompts(2, seed=8, shared=0)
    rig.start({"held": first, "other": second}, 60)
    while left_out(rig):
        pass
    flip(tensor(rig, 0, Part.V)[rig.blocks_of("held", 1)[-1]])
    assert left_out(rig) == 1
    with rig.adapter.hooks.lock:
        rig.canary.delivery.drain(5.0)
    assert listed(rig) == ({"held"}, {None})
    rig.finish()
    rig.settle()
    assert listed(rig) == ({"held"}, {None})


def test_a_damaged_prompt_is_found_before_its_answer_goes_on(seldom: Rig) -> None:
    rig = seldom
    rig.generate([[5, 6, 7, 8]], 2)  # the forward that is shown
    rig.start({"held": prompts(1, seed=8, shared=0)[0]}, 20)
    assert left_out(rig) == 1
    block = rig.blocks_of("held", 1)[-1]
    flip(tensor(rig, 0, Part.V)[block])
    assert left_out(rig) == 1
    assert found_of(rig) == {(Phase.HEAD, Reason.KV_DATA, block)}
    rig.finish()


def test_states_are_shown_again_when_their_records_were_declared_unknown(seldom: Rig) -> None:
    rig = seldom
    rig.start({"held": prompts(1, seed=8, shared=0)[0]}, 40)
    while not left_out(rig):
        pass
    assert left_out(rig, 2) == 2
    with rig.adapter.paused():
        own = torch.tensor([rig.blocks_of("held", 1)[-1]], device=rig.runner.device)
        rig.canary.state.by_name["state"].adopt(own)
        rig.canary.check_everything()  # takes a baseline
    assert left_out(rig) == 0
    assert left_out(rig, 3) == 3
    rig.finish()
    assert rig.settle() == []


def test_states_that_are_never_shown_again_are_missed(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, unchecked: Report
) -> None:
    """How many may be left out is counted by the worker."""
    rig = make_rig("falcon_h1", canary={"state_interval": "16"}, **STATES)
    rig.fresh()
    rig.generate([[5, 6, 7, 8]], 20)
    assert rig.canary.verdict() == (State.OK, ())
    monkeypatch.setattr(rig.adapter.states, "_until_shown", 1000)
    started = time.monotonic()
    rig.generate(prompts(1, seed=8, shared=0), 60)
    state, reasons = rig.canary.verdict()
    named, seconds = "forwards were not shown or not checked: state", time.monotonic() - started
    unchecked("states are never shown again", "vLLM V1", (state.value, reasons), names=named, seconds=seconds)
    rig.generate(prompts(4, seed=9), 40)
    assert rig.settle() == []


def test_a_state_moves_to_the_next_block_and_is_joined_from_the_cache(rig: Rig) -> None:
    rig.fresh()
    assert rig.canary.state.coverage == 1.0
    prompt = list(range(10, 130))
    rig.generate([prompt], 12)  # its 128th token fills the first block
    rig.generate([[*prompt, 5, 6, 7, 8, 9, 10, 11, 12, 13]], 4)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [Part.K, Part.V])
def test_a_flip_in_a_cached_state_is_found(rig: Rig, layer: int, part: Part) -> None:
    rig.fresh()
    rig.generate(prompts(2, seed=5, shared=280, groups=1), 4)
    block = rig.idle_blocks(group=1)[-1]
    flip(tensor(rig, layer, part)[block])
    kv_data = Reason.KV_DATA
    assert found_in(rig, {block}) == {(Phase.PATROL, kv_data), (Phase.SWEEP, kv_data)}
    assert {violation.part for violation in rig.found} == {part}


def listed(rig: Rig) -> tuple[set[str], set[str | None]]:
    """Who is listed for damage of states, and why there may be more."""
    tracker = rig.canary.taint.tracker
    own = [damage for damage in tracker.damages.values() if damage.row.group == "state"]
    names = {tracker.readers.lives.names[life].split("-")[0] for damage in own for life in damage.readings}
    return names, {damage.cause for damage in own}


def test_who_computes_from_a_damaged_state_is_listed(rig: Rig) -> None:
    rig.fresh()
    first, second, third = prompts(3, seed=8, shared=0)
    rig.start({"before": first}, 4)
    rig.finish()
    rig.start({"held": second, "other": third}, 20)
    rig.step(5)
    flip(tensor(rig, 0, Part.V)[rig.blocks_of("held", 1)[-1]])
    rig.step(1)
    with rig.adapter.hooks.lock:
        rig.canary.delivery.drain(5.0)
    assert listed(rig) == ({"held"}, {None})
    rig.finish()


def test_who_computes_from_a_damaged_state_is_ended_under_protect(rig: Rig) -> None:
    rig.fresh()
    held, other = prompts(2, seed=9, shared=0)
    rig.canary.healing.choose(HealPolicy.PROTECT)
    try:
        rig.start({"held": held, "other": other}, 20)
        rig.step(5)
        before = counts(rig).get(("end", "done"), 0)
        flip(tensor(rig, 0, Part.V)[rig.blocks_of("held", 1)[-1]])
        rig.step(1)
        running = {one.request_id.split("-")[0] for one in rig.core.scheduler.running}
        rig.step(1)  # the account of it comes with the next output
        assert (running, counts(rig)["end", "done"] - before) == ({"other"}, 1)
    finally:
        rig.canary.healing.choose(HealPolicy.OFF)
        rig.finish()


def test_one_word_of_a_cached_state_is_put_back(rig: Rig) -> None:
    rig.fresh()
    rig.generate(prompts(2, seed=6, shared=280, groups=1), 4)
    rig.canary.healing.choose(HealPolicy.REPAIR)
    rig.generate(prompts(1, seed=7, shared=0), 2)  # the scheduler hears of the policy
    try:
        with rig.at_rest():
            state = tensor(rig, 0, Part.V)[rig.idle_blocks(group=1)[-1]]
            before = state.clone()
            flip(state)
            rig.settle()
            assert torch.equal(state, before)
        assert counts(rig)["repair", "done"] == 1
    finally:
        rig.canary.healing.choose(HealPolicy.OFF)
        rig.generate(prompts(1, seed=7, shared=0), 2)


def test_who_joins_a_damaged_cached_state_is_listed(rig: Rig) -> None:
    rig.fresh()
    prompt = prompts(1, seed=5, shared=280)[0][:280]
    rig.generate([prompt], 4)
    with rig.adapter.hooks.lock:
        flip(tensor(rig, 0, Part.V)[rig.idle_blocks(group=1)[-1]])
    rig.start({"joins": [*prompt, 5, 6, 7]}, 4)
    rig.finish()
    rig.settle()
    names, causes = listed(rig)
    assert "joins" in names
    assert causes == {None}


def flipped_while_it_runs(rig: Rig, prompt: list[int]) -> bool:
    """Found before the next forward overwrites it. Returns whether that goes on in the next block."""
    rig.fresh()
    rig.start({"held": prompt}, 20)
    rig.step(5)
    block = rig.blocks_of("held", 1)[-1]
    flip(tensor(rig, 0, Part.V)[block])
    rig.step(1)
    with rig.adapter.hooks.lock:
        rig.canary.delivery.drain(5.0)  # on a GPU findings arrive later
    found = {(row.phase, row.reason, row.slot) for row in rig.found if row.phase is not Phase.PATROL}
    now = rig.blocks_of("held", 1)[-1]
    # Where the next block begins, vLLM has copied the damaged bytes there: they are compared as a copy, too.
    phases = {Phase.HEAD} if now == block else {Phase.HIT, Phase.HEAD}
    assert found == {(phase, Reason.KV_DATA, now) for phase in phases}
    rig.finish()
    return now != block


@pytest.mark.parametrize(("tokens", "copied"), [(123, False), (124, True)])
def test_a_flip_in_a_running_state_is_found_before_the_next_forward_overwrites_it(
    rig: Rig, tokens: int, copied: bool
) -> None:
    assert flipped_while_it_runs(rig, list(range(10, 10 + tokens))) is copied


def test_a_copy_that_is_wrong_is_found_when_its_forward_begins(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies a state when a request goes on in its next block."""
    from vllm.v1.worker import mamba_utils

    rig.fresh()
    rig.start({"grows": list(range(10, 135))}, 12)  # its 128th token fills the first block
    copy = mamba_utils.do_mamba_copy_block
    wrong: set[int] = set()

    def do_mamba_copy_block(buffers: Any) -> None:
        copy(buffers)
        if buffers.offset:
            block = rig.blocks_of("grows", 1)[-1]
            wrong.add(block)
            flip(tensor(rig, 1, Part.K)[block])

    monkeypatch.setattr(mamba_utils, "do_mamba_copy_block", do_mamba_copy_block)
    rig.finish()
    assert wrong
    found = {(violation.phase, violation.reason, violation.slot) for violation in rig.found}
    # The damaged bytes are compared as a copy, and as what the forward overwrites.
    assert found == {(phase, Reason.KV_DATA, block) for phase in (Phase.HIT, Phase.HEAD) for block in wrong}
    assert {violation.group for violation in rig.found} == {"state"}


def table(rig: Rig) -> Any:
    """The states' block table, which the next step copies from: [requests, blocks]."""
    if hasattr(rig.runner, "req_states"):
        return rig.runner.block_tables.block_tables[1].gpu.numpy()
    return rig.runner.input_batch.block_table[1].block_table.np


def found_of(rig: Rig) -> set[tuple[Phase, Reason, int]]:
    with rig.adapter.hooks.lock:
        rig.canary.delivery.drain(5.0)
    assert {row.group for row in rig.found} <= {"state"}
    return {(row.phase, row.reason, row.slot) for row in rig.found}


def test_two_requests_whose_states_are_exchanged_are_found(rig: Rig) -> None:
    rig.fresh()
    first, second = prompts(2, seed=8, shared=0)
    rig.start({"one": first, "other": second}, 20)
    rig.step(5)
    rows = [rig.row_of("one"), rig.row_of("other")]
    blocks = {rig.blocks_of(name, 1)[-1] for name in ("one", "other")}
    assert found_of(rig) == set()
    table(rig)[rows, 0] = table(rig)[rows[::-1], 0]
    rig.step(1)
    assert found_of(rig) == {(Phase.TAIL, Reason.WRITE_TOKEN, block) for block in blocks}
    table(rig)[rows, 0] = table(rig)[rows[::-1], 0]
    rig.finish()
    assert {reason for _, reason, _ in found_of(rig)} == {Reason.WRITE_TOKEN}


def test_a_table_entry_that_leads_to_a_cached_state_is_found(rig: Rig) -> None:
    rig.fresh()
    rig.generate(prompts(2, seed=5, shared=280, groups=1), 4)
    cached = rig.idle_blocks(group=1)[-1]
    rig.start({"astray": prompts(1, seed=8, shared=0)[0]}, 20)
    rig.step(5)
    row, own = rig.row_of("astray"), rig.blocks_of("astray", 1)[-1]
    assert found_of(rig) == set()
    table(rig)[row, 0] = cached
    rig.step(1)
    assert (Phase.TAIL, Reason.WRITE_TOKEN, cached) in found_of(rig)
    table(rig)[row, 0] = own
    rig.finish()
    rig.settle()
    assert (Phase.SWEEP, Reason.KV_DATA, cached) in found_of(rig)


@pytest.mark.usefixtures("attached_again")
def test_states_are_protected_where_it_is_not_known_which_tokens_are_here(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the canary is told of a second rank (decode context parallelism): the block tables know of one."""
    parallel = rig.runner.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "decode_context_parallel_size", 2)
    attach_to_worker(rig.worker)
    monkeypatch.undo()
    rig.collect_from()
    assert [group.name for group in rig.canary.state.groups] == ["state"]
    state, reasons = rig.canary.verdict()
    assert state is State.DEGRADED
    share = 1 - rig.canary.state.coverage
    assert 0.05 < share < 0.95
    assert any("spread over 2 ranks" in text and f"{share:.1%}" in text for text in reasons), reasons
    rig.generate(prompts(4, seed=5, shared=280, groups=2), 8)
    rig.generate(prompts(4, seed=5, shared=280, groups=2), 8)
    assert rig.settle() == []
    assert rig.checks() > 0
    assert not rig.canary.health.faults
    block = rig.idle_blocks(group=1)[-1]
    flip(tensor(rig, 0, Part.K)[block])
    assert found_in(rig, {block}) == {(Phase.PATROL, Reason.KV_DATA), (Phase.SWEEP, Reason.KV_DATA)}

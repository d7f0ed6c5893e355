"""Harm done to a real vLLM in this process, and what its healing did about it."""

from __future__ import annotations

import random
import time

import pytest
from msgspec import structs

from canary_obs.heals import Heal
from tests.engines.vllm.heal.false_findings import false_finding
from tests.engines.vllm.real.rig import Rig


def prompt(seed: int, length: int = 150) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 1024) for _ in range(length)]


def damage(rig: Rig, block: int) -> None:
    """Large enough to change what is answered."""
    for layer in range(3):
        rig.layer_cache(0, layer)[block].mul_(-3.0).add_(1.0)


def counts(rig: Rig) -> dict[tuple[str, str], int]:
    return {
        (action.value, outcome.value): number
        for action, of in rig.canary.healing.counts.items()
        for outcome, number in of.items()
        if number
    }


def preempt(rig: Rig, name: str) -> None:
    """As vLLM does for lack of blocks."""
    scheduler = rig.core.scheduler
    request = next(one for one in scheduler.running if one.request_id.startswith(name))
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def read_another_block(rig: Rig) -> None:
    """`a` reads a block of `b`."""
    table, rows = rig.block_table()
    first, second = (next(row for name, row in rows.items() if name.startswith(own)) for own in "ab")
    table[first, 1] = int(table[second, 1])


def reuse(rig: Rig, block: int, seed: int) -> None:
    """Requests until one has cached something in the block."""
    for number in range(20):
        if block in rig.idle_blocks():
            return
        rig.generate([prompt(seed + number, 700)], tokens=1)
    raise AssertionError(f"block {block} is not given to requests")


def release(rig: Rig) -> None:
    rig.canary.healing.release(None)
    for seed in (14, 15):  # the scheduler hears of it, and answers
        rig.generate([prompt(seed, 20)], tokens=1)


def flood(rig: Rig, names: dict[str, list[int]]) -> tuple[list[Heal], dict[str, str]]:
    """What was done, and how the requests ended, as ten steps report all that is cached or used."""
    heals: list[Heal] = []
    manager = rig.core.scheduler.kv_cache_manager
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.canary.healing, "_send", heals.extend)
        rig.start(names, tokens=24)
        rig.step(6)
        for _ in range(10):
            used = [block.block_id for block in manager.block_pool.blocks[1:] if block.ref_cnt]
            with rig.adapter.hooks.lock:  # else the idle thread may deliver at the same time
                rig.canary.delivery.deliver(
                    [
                        structs.replace(false_finding(block, 32), slot=slot, step=rig.canary.step)
                        for block in rig.idle_blocks() + used
                        for slot in range(32 * block, 32 * (block + 1))
                    ]
                )
            rig.step()
        reasons = finish(rig)
        rig.generate([prompt(58, 20)], tokens=2)  # the scheduler's last answer
    return heals, reasons


def finish(rig: Rig, answers: dict[str, list[int]] | None = None) -> dict[str, str]:
    reasons: dict[str, str] = {}
    engine = rig.llm.llm_engine
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                reasons[output.request_id] = str(output.outputs[0].finish_reason)
                if answers is not None:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
    return reasons


def since(rig: Rig, before: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    now = counts(rig)
    return {
        what: number - before.get(what, 0) for what, number in now.items() if number > before.get(what, 0)
    }
